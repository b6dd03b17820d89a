"""A policy that decides nothing by reason: any mode in any step, groups parked or driven out."""

from __future__ import annotations

import random

from neojax.scheduler.offer import Choice, Offer
from neojax.scheduler.plan import Mode
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.request import Placement
from neojax.scheduler.situation import Situation


class RandomModes(OffloadPolicy):
    """Keeps to a mode for a few steps, so that groups get far and are parked for long."""

    name = "random-modes"
    placements = (Placement.DEVICE, Placement.HOST)
    needs_rolling = True

    def __init__(self, rng: random.Random, change: float = 0.3) -> None:
        """change: probability of another mode in each step."""
        self.rng = rng
        self.change = change
        self.mode = Mode.ROLLING
        self.enters = True

    def choose(self, offer: Offer, now: Situation) -> Choice:
        rng = self.rng
        if rng.random() < self.change:
            self.mode, self.enters = rng.choice(list(Mode)), rng.random() < 0.7
        if self.mode is Mode.ROLLING:
            group = offer.group[: rng.randint(0, len(offer.group))] if self.enters else ()
            if group or offer.num_under_way:
                return Choice(offer.trimmed(offer.num_tokens), entering=group)
        if self.mode is Mode.DEVICE_ONLY:
            chunks = offer.trimmed(offer.num_tokens, device_only=True)
            if chunks or offer.device_decodes:
                return Choice(chunks)
        return self.everything(offer)

    def wants_back(self, now: Situation) -> bool:
        return self.rng.random() < 0.5
