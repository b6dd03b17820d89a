"""Policies that do one thing always, to choose between or to compare with."""

from __future__ import annotations

from neojax.scheduler.offer import Choice, Offer
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.request import Placement
from neojax.scheduler.situation import Situation


class DeviceOnly(OffloadPolicy):
    """Every request's attention on the device; when it is full, requests wait."""

    name = "device-only"
    placements = (Placement.DEVICE,)


class Full(OffloadPolicy):
    """Every request's KV on the host: the FastDecode+ baseline of the paper."""

    name = "full"
    placements = (Placement.HOST,)


def rolling_choice(offer: Offer, now: Situation) -> Choice:
    """What a ROLLING step runs: prefill in pieces that leave the host rows their pace.

    While the device has rows to gain, prefill comes first.
    """
    limit = offer.num_tokens
    outlook = now.outlook
    if outlook is not None and outlook.chunk_tokens and now.num_device >= outlook.num_device_rows:
        limit = min(limit, outlook.chunk_tokens)
    return Choice(offer.trimmed(limit), reason="host rows ride along")


class RollingLane(OffloadPolicy):
    """The device while it has blocks, then the host, whose rows ride in the device's batch."""

    name = "rolling"
    placements = (Placement.DEVICE, Placement.HOST)
    rolls = True

    def choose(self, offer: Offer, now: Situation) -> Choice:
        return rolling_choice(offer, now)

    def wants_back(self, now: Situation) -> bool:
        return True
