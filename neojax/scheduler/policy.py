"""Offload policies: where a request's KV goes, and how host rows are split into sub-batches."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import ClassVar

from neojax.scheduler.plan import Row
from neojax.scheduler.request import Placement


class OffloadPolicy:
    """One class per policy; `module:Class` names one of a user's own."""

    name: ClassVar[str]
    placements: ClassVar[tuple[Placement, ...]]
    """Where requests may live, the preferred side first."""
    rolls: ClassVar[bool] = False
    """Whether host rows advance by one layer per step, in ROLLING steps."""

    def split(
        self, host_decodes: Sequence[Row], has_device_work: bool
    ) -> tuple[Sequence[Row], Sequence[Row]]:
        """Host rows of b0 and of b1; b0 takes some only when it has no device work.

        With device work, b0 is that work and b1 all host rows: their attention runs under b0's
        linear stages. Without, two halves hide each other's attention.
        """
        if has_device_work:
            return (), host_decodes
        half = (len(host_decodes) + 1) // 2
        return host_decodes[:half], host_decodes[half:]


class Auto(OffloadPolicy):
    """The device while it has blocks, then the host."""

    name = "auto"
    placements = (Placement.DEVICE, Placement.HOST)


class DeviceOnly(OffloadPolicy):
    """The host holds no KV; when the device is full, requests wait."""

    name = "device-only"
    placements = (Placement.DEVICE,)


class Full(OffloadPolicy):
    """Every request's KV on the host: the FastDecode+ baseline of the paper."""

    name = "full"
    placements = (Placement.HOST,)


class RollingLane(OffloadPolicy):
    """The device while it has blocks, then the host, whose rows ride in the device's batch."""

    name = "rolling"
    placements = (Placement.DEVICE, Placement.HOST)
    rolls = True


_POLICIES: dict[str, type[OffloadPolicy]] = {
    p.name: p for p in (Auto, DeviceOnly, Full, RollingLane)
}


def load_policy(name: str) -> OffloadPolicy:
    """The policy of that name, or the class at `module:Class`.

    Raises ValueError when there is none.
    """
    if name in _POLICIES:
        return _POLICIES[name]()
    module, _, cls = name.partition(":")
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
