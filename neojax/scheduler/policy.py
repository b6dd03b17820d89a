"""The interface of offload policies, and how one is named.

A policy decides where a request's KV lives and which of the rows that could run do run. Memory,
order of arrival and the promise that everybody is served are the scheduler's, under any policy.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import ClassVar

from neojax.scheduler.offer import Choice, Offer
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.situation import Situation


class OffloadPolicy:
    """Runs all it is offered. One class per policy; `module:Class` names one of a user's own."""

    name: ClassVar[str]
    placements: ClassVar[tuple[Placement, ...]]
    """Where requests may live, the preferred side first."""
    needs_rolling: ClassVar[bool] = False
    """Whether it cannot work without programs of ROLLING steps."""
    needs_costs: ClassVar[bool] = False
    """Whether it cannot work without cost tables."""
    keeps_room: ClassVar[bool] = False
    """Whether requests that could be on the device start on the host only where it keeps room for
    a device pool: one that is full then moves out, and is not computed again."""

    def place(
        self, request: Request, possible: Sequence[Placement], room: Sequence[Placement],
        now: Situation,
    ) -> Placement | None:  # fmt: skip
        """Where the first waiting request starts; None lets it wait.

        possible: the pools in which it can finish, in the order of `placements`. room: those of
        them, one at least, that can take it now.
        """
        return room[0]

    def choose(self, offer: Offer, now: Situation) -> Choice:
        """What the step runs beside the device's decodes."""
        if now.num_rolling or offer.num_under_way:
            group = offer.group if now.num_rolling else ()
            chunks = offer.trimmed(offer.num_tokens)
            return Choice(chunks, entering=group, reason="host rows ride along")
        return self.everything(offer)

    def everything(self, offer: Offer) -> Choice:
        """All that can run, without a ROLLING step."""
        host = offer.host_decodes[: offer.num_tokens]
        chunks = offer.trimmed(offer.num_tokens - len(host))
        host0, host1 = self.split(host, bool(offer.device_decodes or chunks))
        return Choice(chunks, host0, host1, "all that can run")

    def split(
        self, host_decodes: Sequence[Request], has_device_work: bool
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        """Host rows of b0 and of b1; b0 takes some only when it has no device work.

        With device work, b0 is that work and b1 all host rows: their attention runs under b0's
        linear stages. Without, two halves hide each other's attention.
        """
        if has_device_work:
            return (), host_decodes
        half = (len(host_decodes) + 1) // 2
        return host_decodes[:half], host_decodes[half:]

    def serves_host(self, now: Situation) -> bool:
        """Whether requests run while they are on the host.

        If not, those that the device can hold wait there for it, before any new request starts.
        """
        return Placement.HOST in self.placements

    def rolls(self, now: Situation) -> bool:
        """Whether host rows are to advance by one layer per step, where there are ROLLING steps.

        It decides how many requests may be on the host, not what a step does.
        """
        return self.needs_rolling

    def wants_back(self, now: Situation) -> bool:
        """Whether requests on the host should move to the device where it has room for them."""
        return False


_POLICIES = {
    "auto": "neojax.scheduler.auto:Auto",
    "device-only": "neojax.scheduler.baselines:DeviceOnly",
    "neo": "neojax.scheduler.neo:Neo",
    "full": "neojax.scheduler.baselines:Full",
    "rolling": "neojax.scheduler.baselines:RollingLane",
}


def load_policy(name: str) -> OffloadPolicy:
    """The policy of that name, or the class at `module:Class`.

    Raises ValueError when there is none.
    """
    module, _, cls = _POLICIES.get(name, name).partition(":")
    if not cls:
        raise ValueError(
            f"offload_policy {name!r} is not one of {', '.join(_POLICIES)}, nor module:Class"
        )
    try:
        policy = getattr(importlib.import_module(module), cls)()
    except (ImportError, AttributeError) as e:
        raise ValueError(f"offload_policy {name!r} cannot be loaded: {e}") from e
    if not isinstance(policy, OffloadPolicy):
        raise ValueError(f"offload_policy {name!r} is not an OffloadPolicy")
    return policy
