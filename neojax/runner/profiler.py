"""Measures what the parts of a step cost, by running the compiled programs themselves.

Nothing is compiled, and nothing waits inside what is measured: launches overlap with the device as
they do in a step. The pools' contents are overwritten, so it runs before the first request.
Attention counts as what a program takes with work less what it takes with none; what it takes
with none is part of the linear stage, so that the sum is the step.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from tqdm import tqdm

from neojax.kv.geometry import KVGeometry
from neojax.kv.host_pool import HostPool
from neojax.runner.lanes import (
    Batch,
    DeviceState,
    SubBatchLane,
    run_rolling,
    start_first_fetch,
)
from neojax.runner.program_set import DEEP
from neojax.runner.programs import Head, Programs
from neojax.runner.rolling import RollingPrograms
from neojax.runner.shapes import AttentionShape, Buckets, Shape
from neojax.runner.swap import Swapper
from neojax.sampling_params import SamplingParams
from neojax.scheduler.costs import CostTables, Table1, Table2
from neojax.scheduler.plan import Mode, Row, SubBatch, Swap
from neojax.scheduler.request import Placement, Progress, Request

MIN_RUNS, MAX_RUNS = 3, 9
RUN_S = 0.05
"""Runs of one point go on until they have taken so long together: short ones are noisier."""
MAX_REPEATS, REPEATED_S = 8, 0.02
"""On a GPU a run is repeated until a measurement takes so long; no more launches than may be in
flight."""
CPU_LAYERS = 4
"""Layers in a run of per-layer programs on the CPU backend, where launches cost little. A GPU runs
as many as the model has: the wait at the end must not count."""
LARGE_TOKENS = 1024
"""Steps of so many tokens are long enough for one group of layers to stand for all."""
FIRST_CONTEXT = 64
CONTEXT_FACTOR = 8
"""Contexts are this far apart: attention is all but linear in them."""
LONG_S = 0.25
"""A run that took so long is not repeated with more context: its cost is scaled by the keys."""


class Profiler:
    """Runs programs on synthetic batches. Needs a host pool, and everything compiled."""

    METHOD: ClassVar[int] = 1
    """The way of measuring. Raise it with any change after which the same programs on the same
    machine would be given other costs: tables measured before, kept on disk, are not used then."""

    def __init__(
        self,
        state: DeviceState,
        programs: dict[tuple[Shape, int], Programs],
        buckets: Buckets,
        geometry: KVGeometry,
        host: HostPool,
        swapper: Swapper,
        *,
        layers_per_program: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._state = state
        self._programs = programs
        self._buckets = buckets
        self._geometry = geometry
        self._host = host
        self._swapper = swapper
        self._group = layers_per_program
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._is_gpu = jax.default_backend() == "gpu"
        self._num_device_blocks = state.pools[0].k.shape[0]
        self._bar: tqdm[Any] = tqdm(disable=True)

    def tables(self, *, progress: bool = True) -> CostTables:
        """Measure everything. A few seconds, most of them in the largest prefill chunks."""
        with tqdm(desc="Measuring costs", unit=" points", disable=not progress) as self._bar:
            linear = {shape: self._linear(shape) for shape in self._buckets.device_shapes}
            pipelined = {s: self._pipelined(s) for s in self._buckets.pipelined_shapes}
            by_rows = _steps(pipelined)
            hop = {
                s: max(0.0, self._pipelined(s) - by_rows(s.num_rows))
                for s in self._buckets.host_shapes
            }
            rolling = {s: self._rolling(s) for s in self._rolling_shapes()}
            prefill_attention = self._prefill_attention(linear)
            device_decode = self._device_decode(linear)
            host_decode = self._host_decode()
            store, fetch = self._copies()
            swap_out, swap_in = self._swaps(Placement.HOST), self._swaps(Placement.DEVICE)
            ends = _steps({s: self._ends(s) for s in self._end_shapes()})
        self._host.reset()
        by_mode = {Mode.DEVICE_ONLY: _steps(linear), Mode.PIPELINED: by_rows}
        if rolling:
            by_mode[Mode.ROLLING] = _steps(rolling)
        return CostTables(
            num_layers=len(self._state.layers),
            linear=by_mode,
            prefill_attention=prefill_attention,
            device_decode=device_decode,
            host_decode=host_decode,
            hop=_steps(hop),
            store=store,
            fetch=fetch,
            swap_out=swap_out,
            swap_in=swap_in,
            per_step=dict.fromkeys(by_mode, ends),
        )

    def _linear(self, shape: Shape) -> float:
        """A layer of a DEVICE_ONLY step with nothing to attend to."""
        empty = self._programs[shape, 0].stages.layout.empty()
        return self._layers(shape, next(reversed(self._programs[shape, 0].layers)), empty)

    def _layers(self, shape: Shape, attention: AttentionShape, packed: np.ndarray) -> float:
        """A layer of the grouped programs."""
        state, group = self._state, self._group
        programs = self._programs[shape, 0]
        one_group = not self._is_gpu or shape.num_tokens >= LARGE_TOKENS
        count = group if one_group else len(state.layers)
        meta, x = programs.embed(state.ends, packed, state.tokens)

        def run() -> jax.Array:
            nonlocal x
            for first in range(0, count, group):
                part = slice(first, first + group)
                pools = tuple(state.pools[part])
                state.pools[part], x = programs.layers[attention](
                    state.layers[part], pools, meta, x
                )
            return x

        return self._seconds(run) / count

    def _pipelined(self, shape: Shape) -> float:
        """A layer of a PIPELINED sub-batch with nothing to attend to."""
        num_layers = len(self._state.layers)
        programs = self._programs[shape, 0]
        batch = Batch(
            programs,
            programs.stages.layout.empty(),
            next(reversed(programs.attend), AttentionShape(0, False)),
            Head.GREEDY,
            has_host_chunks=False,
        )
        lane = SubBatchLane(self._state, batch)
        lane.enter()
        count = self._num_layers()

        def run() -> Any:
            for i in range(count):
                if num_layers == 1:  # no layer has another before it
                    lane.leave()
                    lane.enter()
                else:
                    lane.linear(1 + i % (num_layers - 1))
            return lane.x, lane.attended

        seconds = self._seconds(run) / count
        lane.leave()
        return seconds

    def _rolling_shapes(self) -> list[Shape]:
        return [shape for shape, channel in self._programs if channel == DEEP]

    def _rolling(self, shape: Shape) -> float:
        """A layer of a ROLLING step: nothing to attend to, but a start and a join."""
        state, programs = self._state, self._programs[shape, DEEP]
        assert isinstance(programs, RollingPrograms)
        batch = Batch(
            programs,
            programs.stages.layout.empty(),
            next(reversed(programs.rolling)),
            head=Head.GREEDY,
            has_host_chunks=False,
        )

        def run() -> Any:
            return run_rolling(state, batch, self._group)

        return max(0.0, self._seconds(run) - self._ends(shape)) / len(state.layers)

    def _end_shapes(self) -> list[Shape]:
        """Shapes whose head differs: it has at most `max_num_seqs` rows."""
        tokens = self._buckets.tokens
        count = sum(n < self._max_num_seqs for n in tokens) + 1
        return self._buckets.device_shapes[:count]

    def _ends(self, shape: Shape) -> float:
        """Embedding and head."""
        channel = 0 if (shape, 0) in self._programs else DEEP
        state, programs = self._state, self._programs[shape, channel]
        packed = programs.stages.layout.empty()

        def run() -> jax.Array:
            meta, x = programs.embed(state.ends, packed, state.tokens)
            state.tokens, tokens = programs.head_greedy(state.ends, meta.sampling, x, state.tokens)
            return tokens

        return self._seconds(run)

    def _prefill_attention(self, linear: dict[Shape, float]) -> Table2:
        limit = min(self._max_model_len, self._num_device_blocks * self._geometry.block_size)
        most = min(self._buckets.tokens[-1], limit)
        chunks = _grid(min(32, most), most, 4)
        contexts = _grid(min(FIRST_CONTEXT, limit), limit, CONTEXT_FACTOR)

        def seconds(num_tokens: int) -> Iterator[float]:
            cost, measured = 0.0, num_tokens
            for stop in (max(num_tokens, context) for context in contexts):
                if self._num_layers() * cost > LONG_S:
                    # On average a token sees the prefix and half of its chunk.
                    yield cost * (stop - num_tokens / 2) / (measured - num_tokens / 2)
                    continue
                row = self._row(0, num_tokens, stop, Placement.DEVICE, self._num_device_blocks)
                cost, measured = self._attention(SubBatch(chunks=(row,)), linear), stop
                yield cost

        return Table2(tuple(chunks), tuple(contexts), tuple(tuple(seconds(n)) for n in chunks))

    def _device_decode(self, linear: dict[Shape, float]) -> Table2:
        num_blocks = self._num_device_blocks

        def seconds(lengths: Sequence[int]) -> float:
            rows = tuple(
                self._row(i, 1, n, Placement.DEVICE, num_blocks) for i, n in enumerate(lengths)
            )
            return self._attention(SubBatch(decodes=rows), linear)

        return self._decode(num_blocks, seconds)

    def _host_decode(self) -> Table2:
        num_blocks, p = self._host.num_blocks, self._geometry.block_size
        calls = min(len(self._state.layers), MAX_RUNS)

        def seconds(lengths: Sequence[int]) -> float:
            width = -(-max(lengths) // p)
            tables = np.arange(len(lengths) * width, dtype=np.int32).reshape(-1, width)
            times = self._host.time_decode(np.asarray(lengths, np.int32), tables, calls)
            self._bar.update()
            return statistics.median(times)

        return self._decode(num_blocks, seconds)

    def _decode(self, num_blocks: int, seconds: Callable[[Sequence[int]], float]) -> Table2:
        """A table over rows and the sum of their contexts, rows of equal lengths."""
        p = self._geometry.block_size
        max_rows = min(self._max_num_seqs, num_blocks)
        rows = _grid(1, max_rows, CONTEXT_FACTOR)
        most = min(num_blocks * p, max_rows * self._max_model_len)
        sums = _grid(min(FIRST_CONTEXT, self._max_model_len, most), most, CONTEXT_FACTOR)

        values: list[tuple[float, ...]] = []
        for num_rows in reversed(rows):
            longest = min(self._max_model_len, num_blocks // num_rows * p)
            costs = []
            for i, total in enumerate(sums):
                length = max(1, min(total // num_rows, longest))
                if length == self._max_model_len and values:
                    # No such rows exist: not dearer than the same sum in more rows.
                    costs.append(values[0][i])
                else:
                    costs.append(seconds([length] * num_rows))
            values.insert(0, tuple(costs))
        return Table2(tuple(rows), tuple(sums), tuple(values))

    def _attention(self, batch: SubBatch, linear: dict[Shape, float]) -> float:
        """What a batch's attention adds to a layer."""
        # Alone, a short program would be measured by its launch: on a GPU, whole layers.
        mode = Mode.DEVICE_ONLY if self._is_gpu else Mode.PIPELINED
        has_chunks = bool(batch.chunks)
        shape = self._buckets.shape(mode, batch.num_device_tokens, 0, has_chunks=has_chunks)
        num_blocks = max(len(row.blocks) for row in batch.rows)
        attention = self._buckets.attention(mode, shape, num_blocks, has_chunks=has_chunks)
        layout = self._programs[shape, 0].stages.layout
        packed, _ = layout.pack(batch, 0)
        if self._is_gpu:
            return max(0.0, self._layers(shape, attention, packed) - linear[shape])
        idle = self._attend(shape, attention, layout.empty())
        return max(0.0, self._attend(shape, attention, packed) - idle)

    def _attend(self, shape: Shape, attention: AttentionShape, packed: np.ndarray) -> float:
        """A layer's attention, in a program of its own."""
        programs = self._programs[shape, 0]
        meta, rows = self._entered(shape, packed)
        pools = self._state.pools[: self._num_layers()]

        def run() -> list[jax.Array]:
            return [programs.attend[attention](meta, rows, kv) for kv in pools]

        return self._seconds(run) / len(pools)

    def _entered(self, shape: Shape, packed: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Attention's metadata on the device, and rows of q, k and v."""
        state, programs = self._state, self._programs[shape, 0]
        meta, x = programs.embed(state.ends, packed, state.tokens)
        state.pools[0], rows, _, _ = programs.enter(
            state.layers[0], meta, state.layer_ids[0], x, state.pools[0]
        )
        return meta.attention, rows

    def _copies(self) -> tuple[Table1, Table1]:
        """Copies of a HOST chunk's K/V to the arena, and of its prefix from there, a layer."""
        p = self._geometry.block_size
        limit = min(self._max_model_len, self._host.num_blocks * p)
        shape = self._buckets.pipelined_shapes[-1]
        most = min(shape.num_tokens, limit)
        nothing = self._host_chunk(shape, 0, 0)

        def table(points: Sequence[int], of: Callable[[int], tuple[int, int]]) -> Table1:
            seconds = [self._host_chunk(shape, *of(n)) for n in points]
            return Table1(tuple(points), tuple(max(0.0, s - nothing) for s in seconds))

        # A prefix ends where a block does; one token behind it makes a chunk.
        prefixes = _grid(p, max(p, (limit - 1) // p * p), CONTEXT_FACTOR)
        stores = _grid(min(FIRST_CONTEXT, most), most, CONTEXT_FACTOR)
        store = table(stores, lambda n: (n, n))
        if limit <= p:
            return store, store
        return store, table([n // p * p for n in prefixes], lambda n: (1, n + 1))

    def _swaps(self, to: Placement) -> Table1:
        """A layer of one request's move to the other pool."""
        num_blocks = min(self._num_device_blocks, self._host.num_blocks)
        limit = min(self._max_model_len, num_blocks * self._geometry.block_size)
        points = _grid(min(FIRST_CONTEXT, limit), limit, CONTEXT_FACTOR)

        def seconds(num_tokens: int) -> float:
            row = self._row(0, num_tokens, num_tokens, to, num_blocks)
            swap = Swap(row.request, to, num_tokens, row.blocks, row.blocks)

            def run() -> list[jax.Array]:
                return [due.launch() for due in self._swapper.launches([swap])]

            return self._seconds(run, self._wait_for_swaps) / len(self._state.layers)

        return Table1(tuple(points), tuple(map(seconds, points)))

    def _wait_for_swaps(self, done: list[jax.Array]) -> None:
        jax.block_until_ready(done)
        self._host.await_swaps_out(self._host.num_swaps_out)

    def _host_chunk(self, shape: Shape, num_tokens: int, stop: int) -> float:
        """A layer's moves for one chunk of a HOST request, without its attention.

        Nothing runs beside them: it is what the links and the host's cores are busy for.
        """
        state, programs = self._state, self._programs[shape, 0]
        layout = programs.stages.layout
        packed = layout.empty()
        if num_tokens:
            row = self._row(0, num_tokens, stop, Placement.HOST, self._host.num_blocks)
            packed, plan = layout.pack(SubBatch(chunks=(row,)), self._host.next_plan)
            assert plan is not None
            self._host.put_plan(plan, (1 + MAX_RUNS * MAX_REPEATS) * len(state.layers))
            layout.views(packed)["scalars"][4] = 0  # tiles: moves alone are to be measured
        attention, attend = next(iter(programs.attend.items()))
        batch = Batch(programs, packed, attention, Head.GREEDY, has_host_chunks=True)
        meta, rows = self._entered(shape, packed)
        attended = attend(meta, rows, state.pools[0])

        def run() -> jax.Array:
            nonlocal attended
            start_first_fetch(state, batch)
            for layer, layer_id in enumerate(state.layer_ids):
                this, following = layer % 2, 1 - layer % 2
                state.scratch[this], state.scratch[following], attended, _ = (
                    programs.attend_host_chunks(
                        meta,
                        layer_id,
                        rows,
                        attended,
                        state.scratch[this],
                        state.scratch[following],
                    )
                )
            return attended

        seconds = self._seconds(run) / len(state.layers)
        self._host.reset()
        return seconds

    def _row(
        self, index: int, num_tokens: int, stop: int, placement: Placement, num_blocks: int
    ) -> Row:
        """The last tokens of a sequence of `stop`; those of equal length share no block."""
        count = -(-stop // self._geometry.block_size)
        return Row(
            request=Request("cost", [0] * stop, SamplingParams(), 1, frozenset(), 0, index),
            start=Progress(stop - num_tokens, 0),
            num_tokens=num_tokens,
            samples=False,
            slot=index,
            placement=placement,
            epoch=0,
            blocks=tuple(block % num_blocks for block in range(index * count, (index + 1) * count)),
        )

    def _num_layers(self) -> int:
        num_layers = len(self._state.layers)
        return num_layers if self._is_gpu else min(num_layers, CPU_LAYERS)

    def _seconds(
        self, run: Callable[[], Any], wait: Callable[[Any], object] = jax.block_until_ready
    ) -> float:
        """Median of several measurements; each waits once, at its end.

        A short run is repeated before the wait: the first launch and the wait cost more than the
        launches between, and steps overlap them with the step before.
        """
        started = time.perf_counter()
        wait(run())
        first = time.perf_counter() - started
        repeats = min(MAX_REPEATS, math.ceil(REPEATED_S / first)) if self._is_gpu else 1
        times: list[float] = []
        while len(times) < MIN_RUNS or (len(times) < MAX_RUNS and repeats * sum(times) < RUN_S):
            started = time.perf_counter()
            for _ in range(repeats - 1):
                run()
            wait(run())
            times.append((time.perf_counter() - started) / repeats)
        self._bar.update()
        return statistics.median(times)


def _steps(seconds: dict[Shape, float]) -> Table1:
    """Costs of padded sizes as costs of what is padded to them: constant up to each size."""
    points: dict[int, float] = {}
    below = 0
    for shape, cost in sorted(seconds.items(), key=lambda item: item[0].num_rows):
        points[below + 1] = points[shape.num_rows] = cost
        below = shape.num_rows
    return Table1(tuple(points), tuple(points.values()))


def _grid(first: int, last: int, factor: int) -> list[int]:
    """first, first * factor, ... and last."""
    powers = itertools.takewhile(lambda n: n < last, (first * factor**i for i in itertools.count()))
    return [*powers, last]
