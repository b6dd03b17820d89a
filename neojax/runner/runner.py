"""Executes plans on the device and the host lane.

`enqueue` returns before anything has run; `StepHandle.tokens` waits. Knows nothing of queues.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os

import jax
import jax.numpy as jnp

from neojax.kv.geometry import KVGeometry
from neojax.kv.host_pool import HostPool
from neojax.models.decoder import Decoder
from neojax.ops import attention
from neojax.runner import lanes
from neojax.runner.batches import Batches
from neojax.runner.compile_counter import CompileCounter
from neojax.runner.compiling import compile_all, smaller_step
from neojax.runner.lanes import DeviceState
from neojax.runner.logit_rows import LogitRows
from neojax.runner.logit_state import LogitStateSizes
from neojax.runner.profiler import Profiler
from neojax.runner.program_set import B0, B1, DEEP, ProgramSet, make_programs
from neojax.runner.programs import Arguments, Head, Signature, signatures
from neojax.runner.rolling import Register, RollingPrograms
from neojax.runner.shapes import Buckets, Shape
from neojax.runner.stages import KV, Channel, Stages, head_full, split_model
from neojax.runner.step_handle import StepHandle
from neojax.runner.step_meta import MetaLayout
from neojax.runner.swap import Swapper, chunk_blocks, spread
from neojax.scheduler.costs import CostTables
from neojax.scheduler.limits import scratch_tokens
from neojax.scheduler.plan import Mode, Plan

log = logging.getLogger(__name__)

WARM_UP_ROUNDS = {"gpu": 2}
"""Runs of every program before ready. A GPU records CUDA graphs at the second run, and drops them
when anything is compiled later; on the CPU backend a compiled program has nothing to warm."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Sizes that the runner is built for; `engine.build` derives them from memory and flags."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_device_blocks: int
    num_host_blocks: int
    layers_per_program: int
    cpu_threads: int | None = None
    cpu_bind: str = "auto"
    cpu_isa: str | None = None
    rolling_rows: int = 0  # rows of a group in ROLLING steps; 0: there are no such steps
    token_buckets: tuple[int, ...] | None = None  # padded sizes; None: `Buckets.of`


class Runner:
    """A model, its pools and its compiled programs.

    Programs are compiled from shapes, so the device's pools come last, by `allocate`: XLA needs
    room to try kernels in, which the pools would leave only to activations.
    """

    def __init__(self, model: Decoder, config: RunnerConfig, geometry: KVGeometry) -> None:
        self.config = config
        self.geometry = geometry
        c = model.config
        self._counter = CompileCounter()
        self._buckets = Buckets.of(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            -(-config.max_model_len // geometry.block_size),
            has_host=config.num_host_blocks > 0,
            is_gpu=jax.default_backend() == "gpu",
            tokens=config.token_buckets,
        )
        self.host: HostPool | None = None
        if config.num_host_blocks:
            self.host = HostPool(
                geometry,
                config.num_host_blocks,
                num_heads=c.num_heads,
                max_rows=config.max_num_seqs,
                scale=attention.scale(c.head_dim),
                window=c.sliding_window,
                max_chunk_tokens=config.max_num_batched_tokens,
                max_swap_blocks=config.layers_per_program
                * chunk_blocks(geometry, config.layers_per_program),
                num_threads=config.cpu_threads,
                bind=config.cpu_bind,
                isa=config.cpu_isa,
                rolling_rows=config.rolling_rows,
            )
        self._register = Register(c.num_layers, config.rolling_rows)
        self._dtype = jax.eval_shape(model.ends.embed, jax.ShapeDtypeStruct((1,), jnp.int32)).dtype
        self._hidden_size = c.hidden_size
        ends, layers, self._parts = split_model(model)
        self._logit_rows = LogitRows(
            LogitStateSizes(config.max_num_seqs, c.vocab_size, config.max_model_len)
        )
        self._state = DeviceState(
            ends,
            layers,
            pools=[],
            scratch=[],
            tokens=jnp.zeros(config.max_num_seqs, jnp.int32),
            logit_state=self._logit_rows.make(),
            layer_ids=tuple(jnp.asarray(i, jnp.int32) for i in range(c.num_layers)),
            parked=[],
        )
        self._attention = attention.device_attention(
            geometry=attention.Geometry(
                c.num_heads,
                c.num_kv_heads,
                c.head_dim,
                geometry.block_size,
                geometry.dtype.name,
                self._parts.window,
            )
        )
        self._programs = self._make_programs()
        self._batches = Batches(
            self._programs,
            self._buckets,
            self._state,
            self._logit_rows,
            self._register,
            self.host,
        )
        self._swapper: Swapper | None = None
        if self.host is not None:
            self._swapper = Swapper(
                self._state, geometry, self.host.lane.id, config.layers_per_program
            )

    @property
    def num_compiles(self) -> int:
        """XLA compilations in this process since `warm_up` ended (or since the start)."""
        return self._counter.count

    @property
    def num_programs(self) -> int:
        """Programs that the closed set of shapes needs."""
        return len(self._signatures())

    @property
    def weight_bytes(self) -> int:
        """Device memory of the parameters."""
        layers = self._state.layers
        return sum(leaf.nbytes for leaves in (self._state.ends, *layers) for leaf in leaves)

    @property
    def scratch_tokens(self) -> int:
        """Tokens of the scratch pools: the longest prefix and its chunk."""
        return scratch_tokens(self.config.max_model_len, self.geometry.block_size)

    def enqueue(self, plan: Plan, *, wants_logits: bool = False) -> StepHandle:
        """Launch a step. Returns at once; raises what dispatch raises.

        After an exception the pools are gone: `recover` makes new ones.
        wants_logits: keep the sampled rows' logits, for inspection; compiles on first use.
        """
        state, group = self._state, self.config.layers_per_program
        swaps = spread(self._swapper, plan.swaps, self.geometry.num_layers)
        if plan.mode is Mode.ROLLING:
            batch = self._batches.rolling(plan)._replace(wants_logits=wants_logits)
            sampled = [lanes.run_rolling(state, batch, group, swaps)]
            return StepHandle(plan, sampled, self.host, swaps.done)
        if not any(plan.sub_batches):
            swaps(self.geometry.num_layers - 1)
            return StepHandle(plan, [], self.host, swaps.done)
        batches = [batch._replace(wants_logits=wants_logits) for batch in self._batches.of(plan)]
        if plan.mode is Mode.DEVICE_ONLY:
            (batch,) = batches
            sampled = [lanes.run_device_only(state, batch, group, swaps)]
            host = self.host if plan.swaps else None
        else:
            sampled, host = lanes.run_pipelined(state, batches, swaps), self.host
        return StepHandle(plan, sampled, host, swaps.done)

    def recover(self) -> None:
        """After a failed step: wait for the lane, make new device pools. Host KV stays."""
        if self.host is not None:
            self.host.reset()
        self._state.tokens = jnp.zeros(self.config.max_num_seqs, jnp.int32)
        self._state.logit_state = self._logit_rows.make()
        self.allocate()

    def compile(self, *, progress: bool = True) -> list[tuple[Signature, jax.stages.Compiled]]:
        """Compile every program; the first call of each finds it. Best before `allocate`.

        Raises ValueError where the device's memory does not suffice for one of them alone.
        """
        c = self.config
        return compile_all(
            self._signatures(),
            num_threads=max(1, os.cpu_count() or 1),
            progress=progress,
            remedy=smaller_step(c.max_num_seqs, c.max_num_batched_tokens, self.geometry.block_size),
        )

    def allocate(self) -> None:
        """Make the device's pools, empty, before the first step; what they held is lost."""
        self._state.pools, self._state.scratch = [], []  # not beside those there were
        self._state.pools, self._state.scratch = self._new_pools()
        self._park_groups()

    def warm_up(self) -> None:
        """Run every program where that matters; from then on compiles count."""
        for _ in range(WARM_UP_ROUNDS.get(jax.default_backend(), 0)):
            for shape in self._buckets.device_shapes:
                for attention_shape in self._programs[shape, B0].layers:
                    for head in Head:
                        batch = self._batches.empty(shape, B0, head, attention_shape)
                        lanes.run_device_only(self._state, batch, self.config.layers_per_program)
            if self.host is not None:
                self._warm_up_host()
                self._warm_up_rolling()
            self._state.logit_state = self._logit_rows.warm_up(self._state.logit_state)
            jax.block_until_ready(self._state.tokens)
        self._counter.reset()

    def profile(self, *, progress: bool = True) -> CostTables:
        """Measure what a step's parts cost here; after `warm_up`, before the first request.

        Raises ValueError without a host pool: there is nothing to weigh the device against.
        """
        if self.host is None or self._swapper is None:
            raise ValueError("costs are measured only where there is a host pool")
        profiler = Profiler(
            self._state,
            self._programs,
            self._buckets,
            self.geometry,
            self.host,
            self._swapper,
            layers_per_program=self.config.layers_per_program,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
        )
        tables = profiler.tables(progress=progress)
        self._park_groups()  # the lane has forgotten the jobs of those there were
        return tables

    def fingerprint(self) -> dict[str, str]:
        """What `profile`'s figures depend on, besides the machine and the versions in use."""
        arrays = [(a.shape, a.dtype.name) for a in (*self._state.ends, *self._state.layers[0])]
        host = self.host
        return {
            "model": str(arrays),
            "config": str(self.config),
            "geometry": str(self.geometry),
            "buckets": str(self._buckets),
            "attention": self._attention.name,
            "host": "" if host is None else f"{host.num_threads} threads, {host.lane.isa}",
        }

    def close(self) -> None:
        """Wait for the device, stop the host workers, give up both pools' memory."""
        try:
            jax.block_until_ready(self._state.tokens)
        finally:
            self._state.pools, self._state.scratch = [], []
            if self.host is not None:
                self.host.close()
                self.host = None
            self._counter.close()

    def _warm_up_host(self) -> None:
        assert self._swapper is not None
        for launch in self._swapper.empty_launches():
            launch()
        b = self._buckets
        for i, shape in enumerate([*b.pipelined_shapes, *b.mixed, *b.host_shapes]):
            b1 = self._batches.empty(b.host_shapes[i % len(b.host_shapes)], B1, Head.GREEDY)
            for attention_shape in self._programs[shape, B0].attend or [None]:
                b0 = self._batches.empty(shape, B0, Head.GREEDY, attention_shape)
                lanes.run_pipelined(self._state, [b0, b1])
        for shape in b.mixed:  # some have a head of their own
            attention_shape = next(iter(self._programs[shape, B0].attend))
            for head in (Head.SAMPLE, Head.FULL):
                b0 = self._batches.empty(shape, B0, head, attention_shape)
                lanes.run_pipelined(self._state, [b0])

    def _warm_up_rolling(self) -> None:
        for shape in self._rolling_shapes:
            for attention_shape in self._buckets.attentions(Mode.ROLLING, shape.num_tokens):
                for head in Head:
                    batch = self._batches.empty(shape, DEEP, head, attention_shape)
                    has_chunks = head is Head.GREEDY and attention_shape.has_chunks
                    batch = batch._replace(has_host_chunks=has_chunks)
                    lanes.run_rolling(self._state, batch, self.config.layers_per_program)

    def _new_pools(self) -> tuple[list[KV], list[KV]]:
        """The device pool of each layer, and the scratch of HOST-placed prefills."""
        g, c = self.geometry, self.config

        def pools(shape: tuple[int, ...], count: int) -> list[KV]:
            shape = (*shape, g.num_kv_heads, g.head_dim)
            return [KV(jnp.zeros(shape, g.dtype), jnp.zeros(shape, g.dtype)) for _ in range(count)]

        scratch = pools((self.scratch_tokens,), 2) if self.host is not None else []
        return pools((c.num_device_blocks, g.block_size), g.num_layers), scratch

    @property
    def _rolling_shapes(self) -> list[Shape]:
        rows = self.config.rolling_rows
        return [Shape(tokens, rows) for tokens in self._buckets.grid(Mode.ROLLING)] if rows else []

    def _park_groups(self) -> None:
        """Give each layer a group without rows; the lane has no job of an earlier one."""
        self._register.clear()
        if not self._rolling_shapes:
            return
        programs = self._programs[self._rolling_shapes[0], DEEP]
        assert isinstance(programs, RollingPrograms)
        shape = (self.config.rolling_rows, self._hidden_size)
        self._state.parked = [
            programs.park(jnp.zeros(shape, self._dtype)) for _ in range(self.geometry.num_layers)
        ]

    def _make_programs(self) -> ProgramSet:
        lane = None if self.host is None else self.host.lane.id
        # tokens and logit state are donated
        full = jax.jit(functools.partial(head_full, self._parts), donate_argnums=(3, 4))

        def stages(shape: Shape, index: int, head_rows: int) -> Stages:
            layout = MetaLayout(
                shape=shape,
                max_num_seqs=self.config.max_num_seqs,
                block_size=self.geometry.block_size,
                table_width=-(-self.config.max_model_len // self.geometry.block_size),
                num_device_slots=self.config.num_device_blocks * self.geometry.block_size,
                num_scratch_slots=self.scratch_tokens,
                head_rows=head_rows,
                num_rolling_layers=self.geometry.num_layers if index == DEEP else 0,
            )
            channel = None if lane is None else Channel(lane, index)
            return Stages(self._parts, layout, self._attention, channel)

        return make_programs(self._buckets, self._rolling_shapes, stages, full)

    def _signatures(self) -> list[Signature]:
        state = self._state
        pools, scratch = jax.eval_shape(self._new_pools)
        arguments = Arguments(
            ends=state.ends,
            layers=state.layers,
            pools=tuple(pools),
            scratch=scratch[0] if scratch else None,
            tokens=state.tokens,
            logit_state=state.logit_state,
            layer_ids=state.layer_ids,
            layers_per_program=self.config.layers_per_program,
            hidden_size=self._hidden_size,
            dtype=self._dtype,
        )
        return [
            *signatures(self._programs.values(), arguments),
            *self._logit_rows.signatures(state.logit_state),
            *(() if self._swapper is None else self._swapper.signatures(arguments.pools)),
        ]
