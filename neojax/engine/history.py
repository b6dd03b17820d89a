"""What the last steps did: predicted and measured times, who moved, and why.

`EngineCore.explain` gives it to whoever asks, and a failed step writes it to the log.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque

from neojax.scheduler.plan import Mode, Plan, Prediction

NUM_STEPS = 256
"""Steps that are remembered: seconds to a minute of serving."""


@dataclasses.dataclass(frozen=True, slots=True)
class MoveRecord:
    """A request started, was moved or gave up its blocks."""

    request_id: str
    placement: str | None  # device or host; None: it waits again
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """A completed step."""

    step: int
    mode: Mode
    reason: str  # why the policy chose it
    num_chunk_tokens: int
    num_device_decodes: int
    num_host_rows: tuple[int, int]  # of b0 and of b1; of a ROLLING step, those that enter and leave
    num_under_way: int  # rows between two layers: advancing in ROLLING steps, parked in others
    predicted: Prediction | None  # None without cost tables
    step_s: float  # from the later of its launch and the end of the step before, to its end
    host_attention_s: float  # the workers' busy time meanwhile
    moves: tuple[MoveRecord, ...]

    @property
    def lost_s(self) -> float:
        """Seconds more than the device alone would have taken for the same tokens, 0 if less."""
        alone = None if self.predicted is None else self.predicted.device_only_s
        return 0.0 if alone is None else max(0.0, self.step_s - alone)

    def __str__(self) -> str:
        b0, b1 = self.num_host_rows
        text = (
            f"step {self.step} {self.mode.value}: {1e3 * self.step_s:.2f} ms"
            f" (host busy {1e3 * self.host_attention_s:.2f})"
        )
        if (p := self.predicted) is not None:
            text += (
                f", predicted {1e3 * p.step_s:.2f} (linear {1e3 * p.linear_s:.2f}, device attention"
                f" {1e3 * p.device_attention_s:.2f}, host {1e3 * p.host_attention_s:.2f}, hops"
                f" {1e3 * p.hop_s:.2f}, copies {1e3 * p.copies_s:.2f}, per step"
                f" {1e3 * p.per_step_s:.2f})"
            )
        text += (
            f"; {self.num_chunk_tokens} prompt tokens, {self.num_device_decodes} device decodes,"
            f" {b0}+{b1} host rows"
        )
        if self.num_under_way:
            text += f", {self.num_under_way} between two layers"
        text += f"; {self.reason}"
        return text + "".join(
            f"; {m.request_id} -> {m.placement or 'waiting'}: {m.reason}" for m in self.moves
        )


class History:
    """A ring of the last completed steps, and totals over all of them."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=NUM_STEPS)
        self._last_end_s = 0.0
        self._host_busy_s = 0.0
        self.num_lost_steps = 0
        """Steps with host rows that took longer than the device alone would have."""
        self.lost_s = 0.0
        """Seconds that these took longer."""

    def add(self, plan: Plan, launched_s: float, host_busy_s: float) -> StepRecord:
        """A step has completed now. host_busy_s: the workers' busy time since the start.

        launched_s is of `time.perf_counter`. Two steps are in flight, so a step begins when the
        one before it ends, unless it was launched later.
        """
        now = time.perf_counter()
        b0, b1, rolling = plan.b0, plan.b1, plan.rolling
        if plan.mode is Mode.ROLLING:
            host_rows = len(rolling.entering), len(rolling.leaving)
        else:
            host_rows = len(b0.host_decodes), len(b1.host_decodes)
        record = StepRecord(
            step=plan.step,
            mode=plan.mode,
            reason=plan.reason,
            num_chunk_tokens=sum(row.num_tokens for row in b0.chunks),
            num_device_decodes=len(b0.decodes),
            num_host_rows=host_rows,
            num_under_way=rolling.num_under_way,
            predicted=plan.prediction,
            step_s=now - max(launched_s, self._last_end_s),
            host_attention_s=host_busy_s - self._host_busy_s,
            moves=tuple(
                MoveRecord(m.request.request_id, m.placement, m.reason) for m in plan.moves
            ),
        )
        self._last_end_s, self._host_busy_s = now, host_busy_s
        self.num_lost_steps += record.lost_s > 0
        self.lost_s += record.lost_s
        self._records.append(record)
        return record

    def last(self, num_steps: int | None = None) -> list[StepRecord]:
        """The newest steps, oldest first; all that are remembered by default."""
        records = list(self._records)
        return records if num_steps is None else records[max(0, len(records) - num_steps) :]
