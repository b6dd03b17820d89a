"""The paper's policy, to compare with: NEO (arXiv 2411.01142), sections 3 and 4.

Its six steps are 1 budget of the device's decodes, 2 swap out, 3 swap in, 4 admission (the
device, then the host), 5 sub-batches and mode, 6 commit. Step 5 is here; the others are the
scheduler's own, with the paper's thresholds as defaults. The launch term, a constant of 0.8 ms a
layer in the released code, is the measured hop; and where that code fails, this one does not.
"""

from __future__ import annotations

import dataclasses
import operator

from neojax.scheduler.offer import Choice, Chunk, Offer
from neojax.scheduler.plan import Mode
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.prediction import Load, Predictor
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.situation import Situation

MIN_ROWS = 128
"""Rows of a linear stage below which prompts that go to the host are not held back."""


class Neo(OffloadPolicy):
    """Host rows as long as their attention hides, and the mode with more sequences per second."""

    name = "neo"
    placements = (Placement.DEVICE, Placement.HOST)
    needs_costs = True
    keeps_room = True

    def choose(self, offer: Offer, now: Situation) -> Choice:
        assert now.predictor is not None
        if not (offer.device_decodes or offer.chunks):
            # The released code returns no batch here, and may do so for ever.
            return super().choose(offer, now)
        alone = _Batches(offer, now.predictor, now.limits.can_mix)
        alone.hold_back_host_prompts()
        both = _Batches(offer, now.predictor, now.limits.can_mix)
        both.add_host_rows()
        if both.has_host_rows:
            both.hold_back_host_prompts(while_hidden=True)
            rate, rate_alone = both.rate(), alone.rate()
            if rate > rate_alone:
                reason = f"{rate:.0f} sequences/s with host rows, {rate_alone:.0f} without"
                host0, host1 = (rows.requests for rows in both.host)
                return Choice(both.chunks, host0, host1, reason)
        return Choice(alone.chunks, reason="more sequences per second without host rows")

    def wants_back(self, now: Situation) -> bool:
        return True


@dataclasses.dataclass(slots=True)
class _HostRows:
    """The host rows of one sub-batch."""

    requests: list[Request] = dataclasses.field(default_factory=list[Request])
    context: int = 0  # sum of theirs


class _Batches:
    """Two sub-batches under construction: all prefill and device decodes in b0."""

    def __init__(self, offer: Offer, predictor: Predictor, can_mix: bool) -> None:
        self.offer = offer
        self.predictor = predictor
        self.can_mix = can_mix
        # Prompts leave room for the rows on the host; the paper's budget of 20480 tokens is never
        # short, with a small one prompts would keep them out for as long as any wait.
        num_tokens = max(offer.block_size, offer.num_tokens - len(offer.host_decodes))
        self.chunks: list[Chunk] = list(offer.trimmed(num_tokens))
        self.host = (_HostRows(), _HostRows())
        self._decodes = Load(
            num_decodes=len(offer.device_decodes),
            decode_context=sum(r.num_tokens for r in offer.device_decodes),
        )

    @property
    def has_host_rows(self) -> bool:
        """Whether the host would attend to any row."""
        return bool(self.host[0].requests or self.host[1].requests)

    def hold_back_host_prompts(self, *, while_hidden: bool = False) -> None:
        """Drop prompts that go to the host from the end, keeping MIN_ROWS rows.

        while_hidden: and keeping the host's attention hidden (the paper's step "CPU must not idle
        for too long", from the other side). In released code their tokens stay spent; here the
        budget has them back.
        """
        while self.chunks and self.chunks[-1].placement is Placement.HOST:
            last = self.chunks.pop()
            if self._load(0).num_rows < MIN_ROWS or (while_hidden and min(self._slack()) < 0):
                self.chunks.append(last)
                return

    def add_host_rows(self) -> None:
        """To the sub-batch with more slack, where their attention hides: first those that have
        waited long, then in order of arrival, as the paper has them all.
        """
        left = self.offer.num_tokens - sum(chunk.num_tokens for chunk in self.chunks)
        predictor, device = self.predictor, self._load(0)
        attention_s = predictor.attention_s(device)
        # A row lengthens its own linear stage and its own attention; nothing else changes.
        linear_s = [predictor.linear_s(Mode.PIPELINED, n, 0) for n in (device.num_rows, 0)]
        host_s = [0.0, 0.0]
        # Hundreds of rows, each a look at the table.
        host_decode, correction = predictor.tables.host_decode, predictor.corrections.host_attention
        target, too_long = 1, None
        due, others = (
            self.offer.host_decodes[: self.offer.num_due],
            self.offer.host_decodes[self.offer.num_due :],
        )
        for request in (*due, *sorted(others, key=operator.attrgetter("order"))):
            if left <= 0:
                break
            num_tokens = request.num_tokens
            if too_long is not None and num_tokens >= too_long:
                continue
            rows = self.host[target]
            count, context = len(rows.requests) + 1, rows.context + num_tokens
            longer_s = correction * host_decode(count, context)
            if longer_s > (linear_s[0] if target else linear_s[1] + attention_s):
                too_long = num_tokens
                continue
            rows.requests.append(request)
            rows.context = context
            num_rows = count if target else device.num_rows + count
            linear_s[target] = predictor.linear_s(Mode.PIPELINED, num_rows, count)
            host_s[target] = longer_s
            left -= 1
            slack = linear_s[1] + attention_s - host_s[0], linear_s[0] - host_s[1]
            target = 1 if slack[1] > slack[0] or not self.can_mix else 0

    def rate(self) -> float:
        """Sequences per second of device time: the host is hidden by construction."""
        num_sequences = len(self.chunks) + self._decodes.num_decodes
        num_sequences += sum(len(rows.requests) for rows in self.host)
        stores = any(c.placement is Placement.HOST for c in self.chunks)
        mode = Mode.PIPELINED if self.has_host_rows or stores else Mode.DEVICE_ONLY
        b0, b1 = (self._load(i)._replace(host_context=0) for i in (0, 1))
        times = self.predictor.layer_times(mode, b0, b1)
        seconds = times.linear0 + times.attention0 + times.linear1
        return num_sequences / (seconds * self.predictor.tables.num_layers or 1.0)

    def _slack(self) -> tuple[float, float]:
        """Time of each sub-batch's host attention that is left under the other's device work."""
        b0, b1 = self._load(0), self._load(1)
        times = self.predictor.layer_times(Mode.PIPELINED, b0, b1)
        return (
            times.linear1 + times.attention0 - times.host0,
            times.linear0 - times.host1,
        )

    def _load(self, index: int) -> Load:
        host = self.host[index]
        load = Load(num_host_rows=len(host.requests), host_context=host.context)
        if index == 1:
            return load
        on_host = [c for c in self.chunks if c.placement is Placement.HOST]
        return load._replace(
            chunks=tuple((c.num_tokens, c.stop) for c in self.chunks),
            num_decodes=self._decodes.num_decodes,
            decode_context=self._decodes.decode_context,
            store_tokens=sum(c.num_tokens for c in on_host),
            fetch_tokens=sum(c.start for c in on_host),
        )
