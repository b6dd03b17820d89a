"""Totals over all completed steps, for metrics. What each of the last ones did is `history`'s."""

from __future__ import annotations

import bisect
import time
from collections import defaultdict, deque

from neojax.engine.history import NUM_STEPS, StepRecord
from neojax.engine.report import Distribution, StepTotals
from neojax.scheduler.plan import Plan

_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SECONDS = (0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_ERRORS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class _Tally:
    """Counts values by the first bound that they do not pass."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> Distribution:
        return Distribution(list(self._bounds), list(self._counts), self._sum)


class Meters:
    """Told of every request and step."""

    def __init__(self, token_bytes: int) -> None:
        """token_bytes: K and V of one token in all layers."""
        self._token_bytes = token_bytes
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._host_idle_s = 0.0
        self._swap_bytes = {"in": 0, "out": 0}
        self._tokens = _Tally(_TOKENS)
        self._errors = _Tally(_ERRORS)
        self._queue = _Tally(_SECONDS)
        self._prefill = _Tally(_SECONDS)
        self._arrived_s: dict[str, float] = {}  # of requests that wait for their first step
        self._started_s: dict[str, float] = {}  # of those that wait for their first token
        # Of predicted steps with host rows: the device alone, predicted, measured; seconds.
        self._gains: deque[tuple[float, float, float]] = deque(maxlen=NUM_STEPS)

    def arrived(self, request_id: str) -> None:
        """A request waits from now on."""
        self._arrived_s[request_id] = time.perf_counter()

    def ended(self, request_id: str) -> None:
        """A request is gone; most have had their first token before."""
        self._arrived_s.pop(request_id, None)
        self._started_s.pop(request_id, None)

    def launched(self, plan: Plan) -> None:
        """A step begins: requests in it for the first time no longer wait."""
        if not self._arrived_s:
            return
        now = time.perf_counter()
        for row in plan.rows:
            arrived_s = self._arrived_s.pop(row.request.request_id, None)
            if arrived_s is not None:
                self._queue.add(now - arrived_s)
                self._started_s[row.request.request_id] = now

    def completed(self, plan: Plan, record: StepRecord) -> None:
        """A step has completed."""
        if self._started_s:
            now = time.perf_counter()
            for row in plan.sampled_rows:
                started_s = self._started_s.pop(row.request.request_id, None)
                if started_s is not None:
                    self._prefill.add(now - started_s)
        self._seconds[record.mode.value] += record.step_s
        has_host_rows = any(record.num_host_rows)
        if has_host_rows:
            self._host_idle_s += max(0.0, record.step_s - record.host_attention_s)
        for swap in plan.swaps:
            self._swap_bytes["out" if swap.is_out else "in"] += swap.num_tokens * self._token_bytes
        decodes = record.num_device_decodes + sum(record.num_host_rows)
        self._tokens.add(record.num_chunk_tokens + decodes)
        predicted = record.predicted
        if predicted is None or record.step_s <= 0:
            return
        self._errors.add(abs(predicted.step_s / record.step_s - 1))
        if has_host_rows and predicted.device_only_s is not None:
            self._gains.append((predicted.device_only_s, predicted.step_s, record.step_s))

    def totals(self) -> StepTotals:
        """Everything so far; the gains are those of the last steps with host rows."""
        sums = [sum(column) for column in zip(*self._gains, strict=True)]
        alone, predicted, measured = sums or (0.0, 0.0, 0.0)
        return StepTotals(
            seconds=dict(self._seconds),
            host_idle_s=self._host_idle_s,
            swap_bytes=dict(self._swap_bytes),
            tokens=self._tokens.snapshot(),
            queue_s=self._queue.snapshot(),
            prefill_s=self._prefill.snapshot(),
            relative_error=self._errors.snapshot(),
            predicted_gain=alone / predicted if predicted else None,
            measured_gain=alone / measured if measured else None,
        )
