"""The host side of the KV cache: arena, worker pool and lane, made and closed together."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from neojax import _cpu_paged_attn as native
from neojax.config import bound_cores
from neojax.kv.geometry import GIB, KVGeometry
from neojax.ops import host_attention

log = logging.getLogger(__name__)

NUM_PLANS = 8
"""Entries of the lane's ring: two sub-batches of two steps in flight, twice over.

ROLLING holds an entry for each group besides: one a layer, and those of steps in flight.
"""


def check_isa(isa: str | None) -> None:
    """ValueError, naming those there are, if this machine does not run the kernels called so."""
    if isa is not None and isa not in native.available_isas():
        raise ValueError(
            f"--cpu-isa {isa} cannot run on this machine; available: "
            f"{', '.join(native.available_isas())}"
        )


class HostPlan(NamedTuple):
    """What the host lane must know of a sub-batch; goes to the library, not to the device."""

    context_lens: np.ndarray  # i32[B], each with the row's own token
    tables: np.ndarray  # i32[B, W]
    chunks: np.ndarray  # i32[C, 4]: row_offset, num_tokens, start, scratch_slot
    chunk_tables: np.ndarray  # i32[C, W]


class HostWork(NamedTuple):
    """What the host attention has done since the pool was made."""

    busy_s: float
    num_bytes: int  # of K and V that the rows' contexts hold


class HostPool:
    """KV of HOST requests in the library's own memory, and the workers that attend to it."""

    def __init__(
        self,
        geometry: KVGeometry,
        num_blocks: int,
        *,
        num_heads: int,
        max_rows: int,
        scale: float,
        window: int | None = None,
        max_chunk_tokens: int,
        max_swap_blocks: int,
        num_threads: int | None = None,
        bind: str = "auto",
        isa: str | None = None,
        rolling_rows: int = 0,
    ) -> None:
        """window: tokens that each token looks back, its own included; None: all.

        max_swap_blocks: blocks of one layer, times layers, that one call moves at most.
        """
        host_attention.ensure_registered()
        self._window = window or 0
        self.num_blocks = num_blocks
        self._num_plans = NUM_PLANS + (geometry.num_layers + 4 if rolling_rows else 0)
        self._geometry = geometry
        self._num_heads = num_heads
        self._scale = scale
        self._workers = native.WorkerPool(
            num_threads, cpus=bound_cores(bind), nodes=[] if bind == "none" else None
        )
        try:
            self._cache = native.HostKVCache(
                geometry.num_layers,
                num_blocks,
                geometry.num_kv_heads,
                geometry.head_dim,
                geometry.block_size,
                geometry.dtype.name,
                self._workers,
            )
        except RuntimeError as error:
            self._workers.close()
            raise ValueError(f"{error}. Try --cpu-kv-gib with less") from None
        log.info(
            "host KV cache: %.2f GiB touched in %.2f s; %d threads on %d NUMA nodes, %s kernels",
            self._cache.num_bytes / GIB,
            self._cache.touch_s,
            self._workers.num_threads,
            self._workers.num_nodes,
            native.isa(isa or ""),
        )
        # Room for the stores of two layers, so that one can leave while the next comes in.
        row_bytes = (num_heads + 2 * geometry.num_kv_heads) * geometry.head_dim
        staging_bytes = 2 * max_chunk_tokens * row_bytes * geometry.dtype.itemsize
        self.lane = native.HostLane(
            self._cache,
            self._workers,
            num_heads,
            2,
            max_rows,
            scale,
            self._num_plans,
            cuda_device=host_attention.cuda_device(),
            staging_bytes=staging_bytes,
            swap_bytes=max_swap_blocks * geometry.block_bytes // geometry.num_layers,
            isa=isa or "",
            deep_slots=geometry.num_layers + 1 if rolling_rows else 0,
            deep_rows=rolling_rows,
        )
        if (report := self.lane.cuda_report) is not None:
            log.info(
                "host lane: %.1f us from the device to a thread and back", report.round_trip_us
            )
            for note in report.notes:
                log.warning("host lane: %s", note)
        self._next_plan = 0

    @property
    def num_threads(self) -> int:
        """Threads that attend, the lane's own included."""
        return self._workers.num_threads

    @property
    def next_plan(self) -> int:
        """The ring entry that the next `put_plan` fills: the first that is free.

        Raises RuntimeError when all are taken: more is in flight than the ring was made for.
        """
        for _ in range(self._num_plans):
            if not self.lane.plan_in_use(self._next_plan):
                return self._next_plan
            self._next_plan = (self._next_plan + 1) % self._num_plans
        raise RuntimeError(f"all {self._num_plans} plans of the host lane are in use")

    def put_plan(self, plan: HostPlan, num_layers: int) -> None:
        """Hand the lane a sub-batch's tables, before its programs are launched.

        Each layer joins once if there are decode rows, and stores once if there are chunks; then
        the entry may be rewritten.
        """
        uses = num_layers * (bool(len(plan.context_lens)) + bool(len(plan.chunks)))
        self.lane.set_plan(
            self._next_plan,
            plan.context_lens,
            plan.tables,
            plan.chunks,
            plan.chunk_tables,
            uses,
            window=self._window,
        )
        self._next_plan = (self._next_plan + 1) % self._num_plans

    def time_decode(
        self, context_lens: np.ndarray, tables: np.ndarray, num_calls: int
    ) -> list[float]:
        """Seconds of each of so many calls of decode attention, on one layer after the other.

        Writes the last token of every row: for idle moments only.

        Args:
            context_lens: i32[B], each with the row's own token.
            tables: i32[B, W]
        """
        g = self._geometry
        row = (self._num_heads + 2 * g.num_kv_heads) * g.head_dim
        rows = np.zeros((len(context_lens), row), g.dtype)
        if self._window:
            context_lens = np.minimum(context_lens, self._window)
        return native.time_attend(
            self._cache,
            self._workers,
            rows,
            context_lens,
            tables,
            num_q_heads=self._num_heads,
            scale=self._scale,
            num_calls=num_calls,
            isa=self.lane.isa,
        )

    @property
    def num_swaps_out(self) -> int:
        """Calls that moved blocks to the arena, launched so far."""
        return self.lane.num_swaps_out

    def await_swaps_out(self, count: int) -> None:
        """Wait until the first `count` of them have reached it, or failed: see `error`."""
        self.lane.await_swaps_out(count)

    def work(self) -> HostWork:
        """Totals of all jobs so far."""
        counters = self.lane.counters()
        layer_bytes = self._geometry.token_bytes // self._geometry.num_layers
        return HostWork(counters["busy_ns"] / 1e9, counters["tokens"] * layer_bytes)

    def error(self) -> str | None:
        """What went wrong in a worker since the last `reset`."""
        return self.lane.error()

    def reset(self, timeout_s: float = 30.0) -> None:
        """Wait for all jobs, forget plans and errors. KV stays."""
        self.lane.drain(timeout_s)
        self.lane.clear_error()

    def close(self) -> None:
        """Stop the workers and free the arena."""
        self.lane.close()
        self._workers.close()
        del self.lane, self._cache, self._workers
