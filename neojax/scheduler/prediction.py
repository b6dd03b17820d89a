"""How long a step takes: two queues, the device and the host, and a layer's work on each.

    device | linear b0 (i) | attention b0 (i+1) | linear b1 (i) | linear b0 (i+1) | ...
    host   |  attention of b1 (layer i)  | attention of b0's host rows (i+1)  | b1 (i+1) ...

A stage waits for the stage before it on its own queue, and a linear stage also for the host's
attention of its own rows. In the steady state each layer adds the longest cycle of such waits.
Nothing here knows of requests or queues.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from neojax.scheduler.corrections import Corrections
from neojax.scheduler.costs import CostTables
from neojax.scheduler.plan import Mode, Prediction, Row, SubBatch, Swap


class Load(NamedTuple):
    """What a sub-batch asks of the two lanes."""

    chunks: tuple[tuple[int, int], ...] = ()  # tokens of each prefill chunk, context at its end
    num_decodes: int = 0  # on the device
    decode_context: int = 0  # sum of their contexts
    num_host_rows: int = 0
    host_context: int = 0  # sum of their contexts
    store_tokens: int = 0  # of HOST chunks
    fetch_tokens: int = 0  # before HOST chunks

    @property
    def num_rows(self) -> int:
        """Rows of the linear stages."""
        return sum(tokens for tokens, _ in self.chunks) + self.num_decodes + self.num_host_rows

    @classmethod
    def of(cls, batch: SubBatch) -> Load:
        """The load of a sub-batch."""
        host_chunks = batch.host_chunks
        return cls(
            tuple((row.num_tokens, row.stop) for row in batch.chunks),
            len(batch.decodes),
            _context(batch.decodes),
            len(batch.host_decodes),
            _context(batch.host_decodes),
            sum(row.num_tokens for row in host_chunks),
            sum(row.start.token for row in host_chunks),
        )


IDLE = Load()


class LayerTimes(NamedTuple):
    """Seconds of one layer's parts. The paper's terms (section 3) are named beside ours."""

    linear0: float  # T_l0, hop included
    linear1: float  # T_l1, hop included
    attention0: float  # T_ga0: device attention of b0
    host0: float  # T_ca0
    host1: float  # T_ca1
    copies_down: float = 0.0  # device to host, on a queue of their own
    copies_up: float = 0.0


def layer_period(t: LayerTimes) -> float:
    """Seconds that each further layer adds in the steady state.

    The maximum over the cycles of waits: each queue's own work; a sub-batch's linear stage and
    its host rows' attention, which wait for each other; the copies. Longer cycles, over both
    sub-batches, are means of these.
    """
    return max(
        t.linear0 + t.attention0 + t.linear1,
        t.host0 + t.host1,
        t.linear0 + t.host0,
        t.linear1 + t.host1,
        t.copies_down,
        t.copies_up,
    )


def paper_period(t: LayerTimes) -> float:
    """The paper's T/L: both lanes meet after each stage, so slack of one does not help the next."""
    return max(t.linear0, t.host1) + max(t.linear1 + t.attention0, t.host0)


class Predictor:
    """Cost tables and what the measured steps have taught about them."""

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        self.corrections = Corrections()
        # Steps of like sizes follow each other, and a step's candidates have the same decodes and
        # all chunks but the last one. Host rows are hardly ever the same.
        remember = functools.lru_cache(maxsize=4096)
        self._linear_s = remember(self._linear)
        self._hop_s = remember(tables.hop)
        self._chunk_s = remember(tables.prefill_attention)
        self._decode_s = remember(tables.device_decode)
        self._per_step_s = remember(self._per_step)

        self.knee_tokens = self._knee_tokens()
        """Rows with which a linear stage takes half as long again as with one: arithmetic counts
        beside reading the weights."""

        self.even_rows = self._even_rows()
        """Numbers of rows on the lower convex hull of the linear stage: programs are padded to
        buckets, so that a row more may cost as much as many."""

    @property
    def knows_rolling(self) -> bool:
        """Whether the tables tell what ROLLING steps cost."""
        return Mode.ROLLING in self.tables.linear

    def layer_times(
        self, mode: Mode, b0: Load, b1: Load = IDLE, swap_out: int = 0, swap_in: int = 0
    ) -> LayerTimes:
        """One layer's parts, host attention corrected by what was measured.

        swap_out, swap_in: tokens that move during the step.
        """
        c = self.tables
        return LayerTimes(
            linear0=self.linear_s(mode, b0.num_rows, b0.num_host_rows),
            linear1=self.linear_s(mode, b1.num_rows, b1.num_host_rows),
            attention0=self.attention_s(b0),
            host0=self.host_s(b0.num_host_rows, b0.host_context),
            host1=self.host_s(b1.num_host_rows, b1.host_context),
            copies_down=c.store(b0.store_tokens) + c.swap_out(swap_out),
            copies_up=c.fetch(b0.fetch_tokens) + c.swap_in(swap_in),
        )

    def linear_s(self, mode: Mode, num_rows: int, num_host_rows: int) -> float:
        """Seconds of a linear stage of so many rows, with the hop of the host rows among them."""
        return self._linear_s(mode, num_rows) + self._hop_s(num_host_rows)

    def prefill_s(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Seconds of the attention of chunks in one layer: (tokens, context at its end) of each."""
        return sum([self._chunk_s(*chunk) for chunk in chunks])

    def attention_s(self, load: Load) -> float:
        """The device's attention in one layer."""
        decode = self._decode_s(load.num_decodes, load.decode_context)
        return decode + self.prefill_s(load.chunks)

    def host_s(self, num_rows: float, context: float) -> float:
        """The host's attention in one layer, as measured steps have corrected it."""
        return self.corrections.host_attention * self.tables.host_decode(num_rows, context)

    def seconds(
        self, mode: Mode, b0: Load, b1: Load = IDLE, swap_out: int = 0, swap_in: int = 0
    ) -> float:
        """Predicted seconds of a step."""
        times = self.layer_times(mode, b0, b1, swap_out, swap_in)
        return self.step_s(mode, layer_period(times), b0.num_rows, b1.num_rows)

    def step_s(self, mode: Mode, period: float, rows0: int, rows1: int) -> float:
        """A step by the seconds that each layer adds, as measured steps have corrected it.

        rows0, rows1: rows of the linear stages of both sub-batches.
        """
        per_step = self._per_step_s(mode, rows0) + self._per_step_s(mode, rows1)
        return self.corrections.step[mode] * (self.tables.num_layers * period + per_step)

    def rolling_seconds(self, device: Load, group_rows: int, rows: float, context: float) -> float:
        """Predicted seconds of a ROLLING step whose groups have so many rows and sums of contexts.

        Each queue has the whole step for its own work. group_rows: rows that a group is padded to.
        """
        host_s = self.rolling_host_s(rows, context)
        return self.rolling_step_s(self.rolling_device_s(device, group_rows), host_s)

    def rolling_step_s(self, device_s: float, host_s: float) -> float:
        """A ROLLING step by its two parts, as measured steps have corrected it.

        Corrected as a whole: a factor on one part would grow without end while the other is longer.
        """
        return self.corrections.step[Mode.ROLLING] * max(device_s, host_s)

    def rolling_device_s(
        self, device: Load, group_rows: int, swap_out: int = 0, swap_in: int = 0
    ) -> float:
        """The device's part: its rows with a group beside them, starts and joins included."""
        c = self.tables
        device = device._replace(num_host_rows=0)
        times = self.layer_times(Mode.ROLLING, device, IDLE, swap_out, swap_in)
        rows = device.num_rows + group_rows
        linear = c.linear[Mode.ROLLING](rows)
        seconds = c.num_layers * max(linear + times.attention0, times.copies_down, times.copies_up)
        return seconds + c.per_step[Mode.ROLLING](rows)

    def rolling_host_s(self, rows: float, context: float) -> float:
        """The host's part: one layer for each of as many groups as there are layers.

        Less than one row: so many of the groups have one.
        """
        if rows < 1:
            return rows * self.rolling_host_s(1, context / rows)
        return self.tables.num_layers * self.host_s(rows, context)

    def predict_rolling(
        self, device: Load, group_rows: int, groups: Iterable[tuple[int, int]],
        device_only_s: float | None = None, swaps: Iterable[Swap] = (),
    ) -> Prediction:  # fmt: skip
        """A ROLLING step's seconds, term by term; groups: rows and sum of contexts of each."""
        c = self.tables
        moved = _moved_tokens(swaps)
        times = self.layer_times(Mode.ROLLING, device, IDLE, *moved)
        rows = device.num_rows + group_rows
        host = sum(self.host_s(*group) for group in groups)
        return Prediction(
            step_s=self.rolling_step_s(self.rolling_device_s(device, group_rows, *moved), host),
            linear_s=c.num_layers * c.linear[Mode.ROLLING](rows),
            device_attention_s=c.num_layers * times.attention0,
            host_attention_s=host,
            hop_s=0.0,  # part of the linear stages, as they were measured
            copies_s=c.num_layers * (times.copies_down + times.copies_up),
            per_step_s=c.per_step[Mode.ROLLING](rows),
            device_only_s=device_only_s,
        )

    def paper_seconds(self, b0: Load, b1: Load) -> float:
        """Seconds of a PIPELINED step by the paper's formula."""
        times = self.layer_times(Mode.PIPELINED, b0, b1)
        return self.step_s(Mode.PIPELINED, paper_period(times), b0.num_rows, b1.num_rows)

    def predict(
        self, mode: Mode, b0: Load, b1: Load = IDLE, swaps: Iterable[Swap] = (),
        device_only_s: float | None = None,
    ) -> Prediction:  # fmt: skip
        """A step's seconds, term by term."""
        c = self.tables
        times = self.layer_times(mode, b0, b1, *_moved_tokens(swaps))
        hop = c.hop(b0.num_host_rows) + c.hop(b1.num_host_rows)
        return Prediction(
            step_s=self.step_s(mode, layer_period(times), b0.num_rows, b1.num_rows),
            linear_s=c.num_layers * (times.linear0 + times.linear1 - hop),
            device_attention_s=c.num_layers * times.attention0,
            host_attention_s=c.num_layers * (times.host0 + times.host1),
            hop_s=c.num_layers * hop,
            copies_s=c.num_layers * (times.copies_down + times.copies_up),
            per_step_s=self._per_step_s(mode, b0.num_rows) + self._per_step_s(mode, b1.num_rows),
            device_only_s=device_only_s,
        )

    def _linear(self, mode: Mode, num_rows: int) -> float:
        return self.tables.linear[mode](num_rows)

    def _per_step(self, mode: Mode, num_rows: int) -> float:
        return self.tables.per_step[mode](num_rows)

    def _even_rows(self) -> tuple[int, ...]:
        linear = self.tables.linear[Mode.DEVICE_ONLY]
        hull: list[tuple[float, float]] = []
        for point in zip(linear.xs, linear.ys, strict=True):
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        return tuple(int(x) for x, _ in hull)

    def _knee_tokens(self) -> int:
        linear = self.tables.linear[Mode.PIPELINED]
        return next((int(x) for x in linear.xs if linear(x) >= 1.5 * linear(1)), int(linear.xs[-1]))


def _context(decodes: Sequence[Row]) -> int:
    """The sum of theirs: a token more than each has computed."""
    return sum([row.start.token for row in decodes]) + len(decodes)


def _moved_tokens(swaps: Iterable[Swap]) -> tuple[int, int]:
    """Tokens that move out, and in."""
    out = into = 0
    for swap in swaps:
        if swap.is_out:
            out += swap.num_tokens
        else:
            into += swap.num_tokens
    return out, into


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
