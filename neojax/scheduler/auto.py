"""The default policy: of the plans that a step could be, the one that serves most per second.

What a plan is worth is the time that the device alone would need for the same tokens. So the
DEVICE_ONLY candidate is worth its own time, and host rows must earn what they add to the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from neojax.scheduler.balance import best_split
from neojax.scheduler.baselines import rolling_choice
from neojax.scheduler.offer import Choice, Chunk, Offer
from neojax.scheduler.plan import Mode
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.prediction import Load, Predictor
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.situation import Situation
from neojax.scheduler.worth import decode_token_s, device_only_s

CHUNK_STEP = 64
"""Tokens to which the size of a trimmed prefill is exact."""


class Auto(OffloadPolicy):
    """The device while it has blocks, then the host where that pays, by the cost tables.

    Without tables: the host whenever the device is full.
    """

    name = "auto"
    placements = (Placement.DEVICE, Placement.HOST)
    rolls = None

    def place(
        self, request: Request, possible: Sequence[Placement], room: Sequence[Placement],
        now: Situation,
    ) -> Placement | None:  # fmt: skip
        if room[0] is Placement.HOST and Placement.DEVICE in possible and now.outlook is not None:
            return Placement.HOST if now.num_host < now.outlook.num_host_rows else None
        return room[0]

    def choose(self, offer: Offer, now: Situation) -> Choice:
        if now.predictor is None or now.outlook is None:
            return super().choose(offer, now)
        if now.rolling_rows:
            return rolling_choice(offer, now)
        return _Choosing(offer, now, now.predictor).best()

    def wants_back(self, now: Situation) -> bool:
        if now.outlook is None:
            return False
        if now.rolling_rows:
            return True  # the oldest go where they are fast, and younger ones take their places
        return now.num_host > now.outlook.num_host_rows or not now.num_waiting


class _Choosing:
    """One step's candidates."""

    def __init__(self, offer: Offer, now: Situation, predictor: Predictor) -> None:
        assert now.outlook is not None
        self.offer = offer
        self.predictor = predictor
        self.can_mix = now.limits.can_mix
        self.contexts = [0, *itertools.accumulate(r.num_tokens for r in offer.host_decodes)]
        self.num_decodes = len(offer.device_decodes)
        self.decode_context = sum(r.num_tokens for r in offer.device_decodes)
        known = self.num_decodes + len(offer.host_decodes)
        context = (self.decode_context + self.contexts[-1]) / max(1, known)
        rows = now.outlook.num_device_rows
        self.token_s = decode_token_s(predictor, self.num_decodes, context, rows)

    def best(self) -> Choice:
        """The candidate that is worth most per second; DEVICE_ONLY where none is better."""
        offer = self.offer
        chunks = offer.trimmed(offer.num_tokens, device_only=True)
        must_store = bool(offer.chunks) and offer.chunks[0].placement is Placement.HOST
        alone = Choice(chunks, reason="the device alone serves most per second")
        if (self.num_decodes or chunks) and not must_store:
            best, best_worth = alone, 1.0
        else:
            # The prompt at the head is to go to the host, or the device has nothing to do.
            best, best_worth = Choice(), 0.0
        most = min(len(offer.host_decodes), offer.num_tokens)
        last = 0.0
        for num_rows in _halvings(most):
            candidates = [self._with_host(c, num_rows) for c in self._chunks(num_rows)]
            worth, choice = max(candidates, key=lambda c: c[0], default=(0.0, best))
            if worth > best_worth:
                best, best_worth = choice, worth
            if worth < last:
                break  # fewer rows serve less still
            last = worth
        return best

    def _chunks(self, num_rows: int) -> list[tuple[Chunk, ...]]:
        """Sizes of the prefill to weigh beside so many host rows."""
        room = self.offer.num_tokens - num_rows
        full = self.offer.trimmed(room)
        if not num_rows:
            return [full] if full else []
        trimmed = self.offer.trimmed(min(room, self._hiding_tokens(full, num_rows)))
        return [full, trimmed] if trimmed != full else [full]

    def _hiding_tokens(self, full: tuple[Chunk, ...], num_rows: int) -> int:
        """Prefill tokens whose linear stage and attention just cover the host's attention.

        The continuous form of the paper's trim: tokens beyond it hide later steps' host rows.
        Not less than the knee: fewer tokens cost little more than reading the weights.
        """
        low = self.predictor.knee_tokens
        high = sum(chunk.num_tokens for chunk in full)
        b1 = Load(num_host_rows=num_rows, host_context=self.contexts[num_rows])
        while high - low > CHUNK_STEP:
            middle = (low + high) // 2
            b0 = self._device_load(self.offer.trimmed(middle))
            times = self.predictor.layer_times(Mode.PIPELINED, b0, b1)
            if times.linear0 + times.attention0 < times.host1:
                low = middle
            else:
                high = middle
        return high

    def _with_host(self, chunks: tuple[Chunk, ...], num_rows: int) -> tuple[float, Choice]:
        """Worth per second of a step with so many host rows, and the step."""
        rows = self.offer.host_decodes[:num_rows]
        device = self._device_load(chunks)
        contexts = self.contexts[: num_rows + 1]
        split = best_split(self.predictor, device, contexts, can_mix=self.can_mix)
        worth_s = device_only_s(self.predictor, device, num_rows, self.token_s)
        host0, host1 = rows[: split.num_in_b0], rows[split.num_in_b0 :]
        reason = f"{num_rows} host rows serve {worth_s / split.step_s:.2f} times the device alone"
        return worth_s / split.step_s, Choice(chunks, host0, host1, reason)

    def _device_load(self, chunks: Sequence[Chunk]) -> Load:
        on_host = [c for c in chunks if c.placement is Placement.HOST]
        return Load(
            tuple((c.num_tokens, c.stop) for c in chunks),
            self.num_decodes,
            self.decode_context,
            store_tokens=sum(c.num_tokens for c in on_host),
            fetch_tokens=sum(c.start for c in on_host),
        )


def _halvings(most: int) -> list[int]:
    """most, a half of it, ..., 1, 0."""
    return [most >> i for i in range(most.bit_length() + 1)]
