"""Policies that do one thing always, to choose between or to compare with."""

from __future__ import annotations

from neojax.scheduler.offer import Choice, Offer
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.prefills import MIN_CHUNK_TOKENS
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


class RollingLane(OffloadPolicy):
    """The device while it has blocks, then the host, whose rows ride in the device's batch."""

    name = "rolling"
    placements = (Placement.DEVICE, Placement.HOST)
    needs_rolling = True

    def choose(self, offer: Offer, now: Situation) -> Choice:
        """Prefill in pieces that leave the host rows their pace."""
        limit, outlook = offer.num_tokens, now.outlook
        if outlook is not None and outlook.chunk_tokens:
            limit = min(limit, max(MIN_CHUNK_TOKENS, outlook.chunk_tokens))
        return Choice(offer.trimmed(limit), entering=offer.group, reason="host rows ride along")

    def wants_back(self, now: Situation) -> bool:
        """The oldest go where they are fast, and younger ones take their places."""
        return True
