"""Policies that do one thing always, to choose between or to compare with."""

from __future__ import annotations

from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.request import Placement


class DeviceOnly(OffloadPolicy):
    """Every request's attention on the device; when it is full, requests wait."""

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
