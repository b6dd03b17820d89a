"""What holds under any policy: plans that programs can run, and nobody left behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.offer import Choice, Chunk, Offer
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.situation import Situation

log = logging.getLogger(__name__)

MAX_WAIT_STEPS = 128
"""Steps that a host row or a prompt on its way to the host is passed over at most."""


class _Everything(OffloadPolicy):
    """All that can run, in the usual split."""

    name = "everything"
    placements = (Placement.DEVICE, Placement.HOST)


class Supervision:
    """Asks the policy, and overrules it where its answer cannot run or leaves somebody waiting."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._usual = _Everything()

    def checked(self, step: int, offer: Offer, policy: OffloadPolicy, now: Situation) -> Choice:
        """The policy's choice, or all that can run."""
        for chunk in offer.chunks:
            chunk.request.served_step = chunk.request.served_step or step
        choice = policy.choose(offer, now)
        if (fault := self._fault(choice, offer)) is not None:
            log.warning("policy %s %s; the usual choice is taken", policy.name, fault)
            return self._usual.choose(offer, now)
        overdue = max((step - r.served_step for r in _left_out(choice, offer)), default=0)
        if overdue > MAX_WAIT_STEPS:
            everything = self._usual.choose(offer, now)
            reason = f"a request on the host had waited for {overdue} steps"
            return Choice(everything.chunks, everything.host0, everything.host1, reason)
        return choice

    def _fault(self, choice: Choice, offer: Offer) -> str | None:
        """Why the choice cannot be run; None if it can."""
        host = [*choice.host0, *choice.host1]
        if len(set(map(id, host))) < len(host) or not set(host) <= set(offer.host_decodes):
            return f"split {len(offer.host_decodes)} host rows into others than these"
        if not _is_served_in_order(choice, offer):
            return "chose other prefill chunks than the next ones of those offered"
        num_tokens = len(host) + sum(chunk.num_tokens for chunk in choice.chunks)
        if num_tokens > offer.num_tokens:
            return f"chose {num_tokens} tokens of {offer.num_tokens}"
        has_device_work = bool(offer.device_decodes or choice.chunks)
        if choice.host0 and has_device_work and not self._limits.can_mix:
            return f"split {len(host)} host rows as no program can run: some beside device work"
        if choice.host1 and not (choice.host0 or has_device_work):
            return f"split {len(host)} host rows as no program can run: none in b0"
        if not (host or has_device_work) and (offer.host_decodes or offer.chunks):
            return "chose nothing though something can run"
        return None


def _left_out(choice: Choice, offer: Offer) -> Iterator[Request]:
    """Requests on the host, or on their way to it, that the choice passes over."""
    chosen = {*choice.host0, *choice.host1, *(chunk.request for chunk in choice.chunks)}
    yield from (r for r in offer.host_decodes if r not in chosen)
    for chunk in offer.chunks:
        if chunk.placement is Placement.HOST and chunk.request not in chosen:
            yield chunk.request


def _is_served_in_order(choice: Choice, offer: Offer) -> bool:
    """Of each placement the first chunks offered, each shortened only where it may be."""
    for placement in Placement:
        offered = [chunk for chunk in offer.chunks if chunk.placement is placement]
        chosen = [chunk for chunk in choice.chunks if chunk.placement is placement]
        if len(chosen) > len(offered):
            return False
        for ours, theirs in zip(offered, chosen, strict=False):
            if theirs.request is not ours.request or not _fits(theirs, ours, offer.block_size):
                return False
    return True


def _fits(chosen: Chunk, offered: Chunk, block_size: int) -> bool:
    if not 0 < chosen.num_tokens <= offered.num_tokens:
        return False
    is_whole = chosen.num_tokens == chosen.request.num_remaining
    return is_whole or chosen.placement is Placement.DEVICE or chosen.stop % block_size == 0
