"""The default policy: of the plans that a step could be, the one that serves most per second.

What a plan is worth is the time that the device alone, at its best, would need for the same
tokens: a price for a decoded token, and one for a token of a prompt. Host rows must earn what they
add to a step, and so must prefill.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from neojax.scheduler.balance import best_split
from neojax.scheduler.offer import Choice, Chunk, Offer
from neojax.scheduler.plan import Mode
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.prediction import Load, Predictor
from neojax.scheduler.prefills import MIN_CHUNK_TOKENS, Prefill, Prefills
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.situation import Situation
from neojax.scheduler.worth import decode_token_s

UNSEEN = 0.05
"""Share of a step's time that a fetch may add to it and still count as hidden."""


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


class _Candidate(NamedTuple):
    """A step with so many of the offer's host rows, the first of them in b0."""

    worth: float  # per second
    prefill: Prefill
    num_host_rows: int = 0
    num_in_b0: int = 0


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
        self.contexts = [0, *itertools.accumulate([r.num_tokens for r in offer.host_decodes])]
        self.num_decodes = len(offer.device_decodes)
        # Not less than what keeps the device full of decodes, nor so few that weights are most.
        knee = predictor.knee_tokens - self.num_decodes
        least_tokens = max(MIN_CHUNK_TOKENS, knee, now.outlook.prompt_tokens)
        # While the device has decodes to gain, prefill comes first.
        is_full = now.num_device >= now.outlook.num_device_rows
        self.prefills = Prefills(offer, predictor, least_tokens if is_full else None)
        self.token_s = now.outlook.decode_token_s
        if not self.token_s:
            known = self.num_decodes + len(offer.host_decodes)
            decode_context = self.prefills.of(0).load.decode_context
            context = (decode_context + self.contexts[-1]) / max(1, known)
            rows = now.outlook.num_device_rows
            self.token_s = decode_token_s(predictor, self.num_decodes, context, rows)
        self.serves_host = now.outlook.num_host_rows > 0
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
        alone = _Candidate(0.0, self.prefills.of(0))
        num_late = min(offer.num_late, offer.num_tokens) if self.serves_host else 0
        # Not where the prompt at the head is to go to the host, nor where rows there are late.
        if not (must_store or num_late):
            for prefill in self.prefills.sizes(offer.num_tokens, device_only=True):
                if not prefill.load.num_rows:
                    continue
                seconds = self.predictor.seconds(Mode.DEVICE_ONLY, prefill.load)
                worth = self._worth_s(prefill, 0) / seconds
                if worth > alone.worth:
                    alone = _Candidate(worth, prefill)
        best = alone
        most = min(len(offer.host_decodes), offer.num_tokens)
        last = 0.0
        counts = {*_halvings(most), self._hidden_rows(most), num_late}
        for num_rows in sorted((n for n in counts if n >= num_late), reverse=True):
            candidates = [self._with_host(p, num_rows) for p in self._prefills_beside(num_rows)]
            here = max(candidates, key=lambda c: c.worth, default=_Candidate(0.0, alone.prefill))
            if here.worth > best.worth:
                best = here
            if here.worth < last:
                break  # fewer rows serve less still
            last = here.worth
        return self._choice(best, alone)

    def _choice(self, best: _Candidate, alone: _Candidate) -> Choice:
        if best is alone:
            reason = "the device alone serves most per second" if alone.worth else ""
            return Choice(alone.prefill.chunks if alone.worth else (), reason=reason)
        rows = self.offer.host_decodes[: best.num_host_rows]
        reason = (
            f"{best.num_host_rows} host rows: worth {best.worth:.2f} a second, "
            f"the device alone {alone.worth:.2f}"
        )
        host0, host1 = rows[: best.num_in_b0], rows[best.num_in_b0 :]
        return Choice(best.prefill.chunks, host0, host1, reason)

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
            for prefill in self._rolling_sizes():
                device_s = predictor.rolling_device_s(prefill.load, self.rolling_rows)
                worth = self._worth_s(prefill, rows) / predictor.rolling_step_s(device_s, host_s)
                reason = f"{len(group)} host rows enter: worth {worth:.2f} a second"
                yield worth, Choice(prefill.chunks, entering=group, reason=reason)

    def _prefills_beside(self, num_rows: int) -> Sequence[Prefill]:
        """Sizes of the prefill to weigh beside so many host rows."""
        sizes = self.prefills.sizes(self.offer.num_tokens - num_rows)
        if not num_rows:
            return [prefill for prefill in sizes if prefill.chunks]
        if not sizes[0].chunks:
            return sizes
        host_s = self.predictor.host_s(num_rows, self.contexts[num_rows])
        hiding = self.prefills.hiding(sizes[0], host_s)
        return sizes if hiding in sizes else (*sizes, hiding)

    def _rolling_sizes(self) -> Sequence[Prefill]:
        """Sizes of the prefill in a ROLLING step.

        Where the outlook is one of such steps, as much as it has in each: a large piece leaves the
        host idle for most of the step, and afterwards there is none to hide the host's work under.
        But a prompt on its way to the host is cut only where the prefix of its last piece comes
        beside the device's work: else the step would wait for it.
        """
        offer = self.offer
        if not self.is_steady:
            return self.prefills.sizes(offer.num_tokens)
        linear = self.predictor.tables.linear[Mode.ROLLING]
        others = self.num_decodes + self.rolling_rows
        rows = linear.most_for(others + max(MIN_CHUNK_TOKENS, self.chunk_tokens))
        size = int(rows) - others
        lead = offer.chunks[0] if offer.chunks else None
        if lead is not None and lead.placement is Placement.HOST and not self._hides(lead, size):
            size = max(size, lead.num_tokens)
        return (self.prefills.of(min(offer.num_tokens, size)),)

    def _hides(self, chunk: Chunk, size: int) -> bool:
        """Whether a ROLLING step with the last piece of that size fetches all before it unseen."""
        before = max(0, chunk.stop - size)
        piece = Load(((size, chunk.stop),), self.num_decodes, fetch_tokens=before)
        device_s = self.predictor.rolling_device_s
        without = device_s(piece._replace(fetch_tokens=0), self.rolling_rows)
        return device_s(piece, self.rolling_rows) <= (1 + UNSEEN) * without

    def _hidden_rows(self, most: int) -> int:
        """Host rows whose attention just hides under all of the device's work."""
        b0 = self.prefills.of(self.offer.num_tokens).load
        times = self.predictor.layer_times(Mode.PIPELINED, b0)
        covered = times.linear0 + times.attention0

        def excess(num_rows: int) -> float:
            return self.predictor.host_s(num_rows, self.contexts[num_rows]) - covered

        return max(0, bisect.bisect_right(range(most + 1), 0.0, key=excess) - 1)

    def _worth_s(self, prefill: Prefill, num_host_rows: float) -> float:
        return (
            self.token_s * (self.num_decodes + num_host_rows)
            + self.prompt_token_s * prefill.num_tokens
            # The same wherever it is computed.
            + self.predictor.tables.num_layers * prefill.attention_s
        )

    def _with_host(self, prefill: Prefill, num_rows: int) -> _Candidate:
        contexts = self.contexts[: num_rows + 1]
        split = best_split(self.predictor, prefill.load, contexts, can_mix=self.can_mix)
        worth = self._worth_s(prefill, num_rows) / split.step_s
        return _Candidate(worth, prefill, num_rows, split.num_in_b0)


def _halvings(most: int) -> list[int]:
    """most, a half of it, ..., 1, 0."""
    return [most >> i for i in range(most.bit_length() + 1)]
