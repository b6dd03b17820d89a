"""The sizes that a step's prefill may be cut to, and what each asks of the device."""

from __future__ import annotations

from typing import NamedTuple

from neojax.scheduler.offer import Chunk, Offer
from neojax.scheduler.plan import Mode
from neojax.scheduler.prediction import Load, Predictor
from neojax.scheduler.request import Placement

MIN_CHUNK_TOKENS = 64
"""Prefill is not cut smaller: a prompt must get on."""

CHUNK_STEP = 64
"""Tokens to which the size of a trimmed prefill is exact."""


class Prefill(NamedTuple):
    """The first chunks of an offer."""

    chunks: tuple[Chunk, ...]
    num_tokens: int
    attention_s: float  # seconds of its attention in one layer
    load: Load  # of it and of the device's decodes


class Prefills:
    """One offer's. Many candidates have the same prefill, so each size is looked at once.

    least_tokens: prefill is not cut smaller to fill a bucket; None: it is not cut to fill one.
    """

    def __init__(self, offer: Offer, predictor: Predictor, least_tokens: float | None) -> None:
        self._offer = offer
        self._predictor = predictor
        self._least_tokens = least_tokens
        self._decodes = Load(
            num_decodes=len(offer.device_decodes),
            decode_context=sum([r.num_tokens for r in offer.device_decodes]),
        )
        self._all_tokens = sum([chunk.num_tokens for chunk in offer.chunks])
        self._known: dict[tuple[int, bool], Prefill] = {}
        self._known_sizes: dict[tuple[int, bool], tuple[Prefill, ...]] = {}
        self._known_s: dict[int, float] = {}

    def of(self, num_tokens: int, *, device_only: bool = False) -> Prefill:
        """As many of the first tokens as `Offer.trimmed` takes."""
        key = min(num_tokens, self._all_tokens), device_only
        prefill = self._known.get(key)
        if prefill is None:
            prefill = self._known[key] = self._trimmed(*key)
        return prefill

    def sizes(self, room: int, *, device_only: bool = False) -> tuple[Prefill, ...]:
        """All of it there is room for, and the sizes that fill a bucket beside the decodes."""
        key = min(room, self._all_tokens), device_only
        sizes = self._known_sizes.get(key)
        if sizes is None:
            full = self.of(room, device_only=device_only)
            cuts = [
                self.of(n, device_only=device_only)
                for n in self._bucket_tokens()
                if n < full.num_tokens
            ]
            sizes = self._known_sizes[key] = (full, *(cut for cut in cuts if cut.chunks))
        return sizes

    def hiding(self, full: Prefill, host_s: float) -> Prefill:
        """So much of `full` that linear stage and attention just cover the host's attention.

        The continuous form of the paper's trim: tokens beyond it hide later steps' host rows.
        Not less than the knee: fewer tokens cost little more than reading the weights.
        """
        low, high = self._predictor.knee_tokens, full.num_tokens
        while high - low > CHUNK_STEP:
            middle = (low + high) // 2
            if self._layer_s(middle) < host_s:
                low = middle
            else:
                high = middle
        return self.of(high)

    def _bucket_tokens(self) -> list[int]:
        if self._least_tokens is None:
            return []
        sizes = [rows - self._decodes.num_decodes for rows in self._predictor.even_rows]
        return [n for n in sizes if n >= self._least_tokens]

    def _layer_s(self, num_tokens: int) -> float:
        """Seconds of a layer with so much prefill, on the device."""
        seconds = self._known_s.get(num_tokens)
        if seconds is None:
            load = self.of(num_tokens).load
            linear_s = self._predictor.linear_s(Mode.PIPELINED, load.num_rows, 0)
            seconds = self._known_s[num_tokens] = linear_s + self._predictor.attention_s(load)
        return seconds

    def _trimmed(self, num_tokens: int, device_only: bool) -> Prefill:
        chunks = self._offer.trimmed(num_tokens, device_only=device_only)
        if not chunks:
            return Prefill((), 0, 0.0, self._decodes)
        spans = tuple([(c.num_tokens, c.stop) for c in chunks])
        on_host = [c for c in chunks if c.placement is Placement.HOST]
        load = Load(
            spans,
            self._decodes.num_decodes,
            self._decodes.decode_context,
            store_tokens=sum(c.num_tokens for c in on_host),
            fetch_tokens=sum(c.start for c in on_host),
        )
        num_tokens = sum([tokens for tokens, _ in spans])
        return Prefill(chunks, num_tokens, self._predictor.prefill_s(spans), load)
