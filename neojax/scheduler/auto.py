"""The default policy: of the plans that a step could be, the one that serves most per second.

What a plan is worth is the time that the device alone, at its best, would need for the same
tokens: a price for a decoded token, and one for a token of a prompt. Host rows must earn what they
add to a step, and so must prefill.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

from neojax.scheduler.balance import best_split
from neojax.scheduler.offer import Choice, Chunk, Offer
from neojax.scheduler.plan import Mode
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.prediction import Load, Predictor
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.situation import Situation
from neojax.scheduler.worth import decode_token_s

MIN_CHUNK_TOKENS = 64
"""Prefill is not cut smaller: a prompt must get on."""

CHUNK_STEP = 64
"""Tokens to which the size of a trimmed prefill is exact."""


class Auto(OffloadPolicy):
    """The device while it has blocks, then the host where that pays, by the cost tables.

    Without tables: the host whenever the device is full.
    """

    name = "auto"
    placements = (Placement.DEVICE, Placement.HOST)

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
        to_host = any(chunk.placement is Placement.HOST for chunk in offer.chunks)
        on_host = offer.host_decodes or offer.num_under_way
        if not (on_host or to_host or now.outlook.num_host_rows):
            return super().choose(offer, now)  # nothing to weigh: as device-only
        return _Choosing(offer, now, now.predictor).best()

    def rolls(self, now: Situation) -> bool:
        return now.outlook is not None and now.outlook.rolling_rows > 0

    def serves_host(self, now: Situation) -> bool:
        return now.outlook is None or now.outlook.num_host_rows > 0

    def wants_back(self, now: Situation) -> bool:
        if now.outlook is None:
            return False
        return now.num_host > now.outlook.num_host_rows or not now.num_waiting


class _Choosing:
    """One step's candidates."""

    def __init__(self, offer: Offer, now: Situation, predictor: Predictor) -> None:
        assert now.outlook is not None
        self.offer = offer
        self.predictor = predictor
        self.can_mix = now.limits.can_mix
        self.rolling_rows = now.limits.rolling_rows
        self.is_steady = now.outlook.rolling_rows > 0
        self.chunk_tokens = now.outlook.chunk_tokens
        self.may_enter = now.num_rolling > 0
        self.contexts = [0, *itertools.accumulate(r.num_tokens for r in offer.host_decodes)]
        self.num_decodes = len(offer.device_decodes)
        self.decode_context = sum(r.num_tokens for r in offer.device_decodes)
        self.token_s = now.outlook.decode_token_s
        if not self.token_s:
            known = self.num_decodes + len(offer.host_decodes)
            context = (self.decode_context + self.contexts[-1]) / max(1, known)
            rows = now.outlook.num_device_rows
            self.token_s = decode_token_s(predictor, self.num_decodes, context, rows)
        # Not less than what keeps the device full of decodes, nor so few that weights are most.
        knee = predictor.knee_tokens - self.num_decodes
        self.least_tokens = max(MIN_CHUNK_TOKENS, knee, now.outlook.prompt_tokens)
        self.is_full = now.num_device >= now.outlook.num_device_rows
        self.prompt_token_s = now.outlook.prompt_token_s

    def best(self) -> Choice:
        """The candidate that is worth most per second; DEVICE_ONLY where none is better.

        Where the outlook is one of ROLLING steps, or rows of such are under way yet, the best of
        these: a parked group holds back its requests, their blocks and those that wait for them.
        """
        offer = self.offer
        if rolling := list(self._rolling()):
            return max(rolling, key=lambda c: c[0])[1]
        must_store = bool(offer.chunks) and offer.chunks[0].placement is Placement.HOST
        best, best_worth = Choice(), 0.0
        # Not where the prompt at the head is to go to the host.
        for chunks in () if must_store else self._sizes(offer.num_tokens, device_only=True):
            load = self._device_load(chunks)
            if not load.num_rows:
                continue
            worth = self._worth_s(chunks, 0) / self.predictor.seconds(Mode.DEVICE_ONLY, load)
            if worth > best_worth:
                reason = "the device alone serves most per second"
                best, best_worth = Choice(chunks, reason=reason), worth
        best_alone = best_worth
        most = min(len(offer.host_decodes), offer.num_tokens)
        last = 0.0
        for num_rows in sorted({*_halvings(most), self._hidden_rows(most)}, reverse=True):
            candidates = [self._with_host(c, num_rows, best_alone) for c in self._chunks(num_rows)]
            worth, choice = max(candidates, key=lambda c: c[0], default=(0.0, best))
            if worth > best_worth:
                best, best_worth = choice, worth
            if worth < last:
                break  # fewer rows serve less still
            last = worth
        return best

    def _rolling(self) -> Iterator[tuple[float, Choice]]:
        """ROLLING steps, with a further group where the outlook has them, and without."""
        offer, predictor = self.offer, self.predictor
        if not (self.rolling_rows and predictor.knows_rolling):
            return
        layers = predictor.tables.num_layers
        staying_s = sum(predictor.host_s(*load) for load in offer.staying)
        groups = [(), offer.group] if self.may_enter and offer.group else [()]
        for group in groups if offer.num_under_way else groups[1:]:
            # A row is worth a token where it enters, and a layer's part where it gets on: in the
            # steady state they are as many.
            rows = max(len(group), offer.num_under_way / layers)
            host_s = staying_s + predictor.host_s(len(group), sum(r.num_tokens for r in group))
            for chunks in self._rolling_sizes():
                device_s = predictor.rolling_device_s(self._device_load(chunks), self.rolling_rows)
                worth = self._worth_s(chunks, rows) / predictor.rolling_step_s(device_s, host_s)
                reason = f"{len(group)} host rows enter: worth {worth:.2f} a second"
                yield worth, Choice(chunks, entering=group, reason=reason)

    def _chunks(self, num_rows: int) -> list[tuple[Chunk, ...]]:
        """Sizes of the prefill to weigh beside so many host rows."""
        room = self.offer.num_tokens - num_rows
        sizes = self._sizes(room)
        if num_rows and sizes[0]:
            sizes.append(self.offer.trimmed(min(room, self._hiding_tokens(sizes[0], num_rows))))
        return sizes if num_rows else [chunks for chunks in sizes if chunks]

    def _sizes(self, room: int, *, device_only: bool = False) -> list[tuple[Chunk, ...]]:
        """All of the prefill there is room for, and the sizes that fill a bucket beside decodes."""
        full = self.offer.trimmed(room, device_only=device_only)
        num_tokens = sum(chunk.num_tokens for chunk in full)
        sizes = [full]
        # While the device has decodes to gain, prefill comes first.
        for rows in self.predictor.even_rows if self.is_full else ():
            if self.least_tokens <= rows - self.num_decodes < num_tokens:
                cut = self.offer.trimmed(rows - self.num_decodes, device_only=device_only)
                if cut:
                    sizes.append(cut)
        return sizes

    def _rolling_sizes(self) -> list[tuple[Chunk, ...]]:
        """Sizes of the prefill in a ROLLING step.

        Where the outlook is one of such steps, as much as it has in each: a large piece leaves the
        host idle for most of the step, and afterwards there is none to hide the host's work under.
        But a prompt on its way to the host is not cut: its later pieces would fetch their prefix.
        """
        offer = self.offer
        if not self.is_steady:
            return self._sizes(offer.num_tokens)
        linear = self.predictor.tables.linear[Mode.ROLLING]
        others = self.num_decodes + self.rolling_rows
        rows = linear.most_for(others + max(MIN_CHUNK_TOKENS, self.chunk_tokens))
        size = int(rows) - others
        if offer.chunks and offer.chunks[0].placement is Placement.HOST:
            size = max(size, offer.chunks[0].num_tokens)
        return [offer.trimmed(min(offer.num_tokens, size))]

    def _hidden_rows(self, most: int) -> int:
        """Host rows whose attention just hides under all of the device's work."""
        b0 = self._device_load(self.offer.trimmed(self.offer.num_tokens))
        times = self.predictor.layer_times(Mode.PIPELINED, b0)
        covered = times.linear0 + times.attention0

        def excess(num_rows: int) -> float:
            b1 = Load(num_host_rows=num_rows, host_context=self.contexts[num_rows])
            return self.predictor.layer_times(Mode.PIPELINED, Load(), b1).host1 - covered

        return max(0, bisect.bisect_right(range(most + 1), 0.0, key=excess) - 1)

    def _hiding_tokens(self, full: tuple[Chunk, ...], num_rows: int) -> int:
        """Prefill tokens whose linear stage and attention just cover the host's attention.

        The continuous form of the paper's trim: tokens beyond it hide later steps' host rows.
        Not less than the knee: fewer tokens cost little more than reading the weights.
        """
        low = self.predictor.knee_tokens
        high = sum(chunk.num_tokens for chunk in full)
        host_s = self.predictor.host_s(num_rows, self.contexts[num_rows])
        while high - low > CHUNK_STEP:
            middle = (low + high) // 2
            b0 = self._device_load(self.offer.trimmed(middle))
            linear_s = self.predictor.linear_s(Mode.PIPELINED, b0.num_rows, 0)
            if linear_s + self.predictor.attention_s(b0) < host_s:
                low = middle
            else:
                high = middle
        return high

    def _worth_s(self, chunks: tuple[Chunk, ...], num_host_rows: float) -> float:
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        attention = self.predictor.prefill_s(_spans(chunks))
        return (
            self.token_s * (self.num_decodes + num_host_rows)
            + self.prompt_token_s * num_tokens
            # The same wherever it is computed.
            + self.predictor.tables.num_layers * attention
        )

    def _with_host(
        self, chunks: tuple[Chunk, ...], num_rows: int, alone: float
    ) -> tuple[float, Choice]:
        """Worth per second of a step with so many host rows, and the step."""
        rows = self.offer.host_decodes[:num_rows]
        device = self._device_load(chunks)
        contexts = self.contexts[: num_rows + 1]
        split = best_split(self.predictor, device, contexts, can_mix=self.can_mix)
        worth = self._worth_s(chunks, num_rows) / split.step_s
        host0, host1 = rows[: split.num_in_b0], rows[split.num_in_b0 :]
        reason = f"{num_rows} host rows: worth {worth:.2f} a second, the device alone {alone:.2f}"
        return worth, Choice(chunks, host0, host1, reason)

    def _device_load(self, chunks: Sequence[Chunk]) -> Load:
        on_host = [c for c in chunks if c.placement is Placement.HOST]
        return Load(
            _spans(chunks),
            self.num_decodes,
            self.decode_context,
            store_tokens=sum(c.num_tokens for c in on_host),
            fetch_tokens=sum(c.start for c in on_host),
        )


def _spans(chunks: Sequence[Chunk]) -> tuple[tuple[int, int], ...]:
    """As `Load.chunks` has them."""
    return tuple([(c.num_tokens, c.stop) for c in chunks])


def _halvings(most: int) -> list[int]:
    """most, a half of it, ..., 1, 0."""
    return [most >> i for i in range(most.bit_length() + 1)]
