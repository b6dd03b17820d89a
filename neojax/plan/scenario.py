"""One point to simulate: what steps cost, and what the scheduler may use."""

from __future__ import annotations

import dataclasses
import math

from neojax.bench.arrivals import Traffic
from neojax.bench.measure import Counters, measure
from neojax.bench.metrics import Summary
from neojax.models.config import ModelConfig
from neojax.plan.engine import SimulatedEngine
from neojax.plan.machine import EFFICIENCY, NEOJAX_KERNEL, Efficiency, HostKernel, Machine
from neojax.plan.roofline import Roofline
from neojax.scheduler.costs import CostTables, Table1
from neojax.scheduler.limits import MAX_CHUNKS, SchedulerLimits, scratch_tokens
from neojax.scheduler.plan import Mode


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The engine's settings that decide what a step may hold."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    block_size: int = 16
    rolling_rows: int = 32
    tpot_slo_s: float = math.inf
    rotate_steps: int = 0

    def of_pools(
        self, device_kv_tokens: int, host_kv_tokens: int, num_layers: int
    ) -> SchedulerLimits:
        """With pools of so many tokens; the context is cut to the larger one.

        Raises ValueError when neither pool holds two tokens.
        """
        p = self.block_size
        longest = min(self.max_model_len, max(device_kv_tokens, host_kv_tokens) // p * p)
        if longest < 2:
            raise ValueError(
                f"no room for KV cache: {device_kv_tokens} tokens on the device, {host_kv_tokens} "
                f"on the host; a block holds {p}"
            )
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=longest,
            block_size=p,
            num_device_blocks=device_kv_tokens // p,
            num_host_blocks=host_kv_tokens // p,
            max_num_chunks=MAX_CHUNKS,
            scratch_tokens=scratch_tokens(longest, p),
            num_layers=num_layers,
            rolling_rows=min(self.rolling_rows, self.max_num_seqs),
            tpot_slo_s=self.tpot_slo_s,
            rotate_steps=self.rotate_steps,
            can_swap=host_kv_tokens >= p,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A run's summary and counters, and the share of its time that each lane worked."""

    summary: Summary
    counters: Counters
    device_share: float
    host_share: float


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """A simulated engine but for its policy."""

    tables: CostTables
    limits: SchedulerLimits
    rolls: bool = False  # whether policies that can do without ROLLING steps have them too

    def run(
        self, policy: str, traffic: Traffic, warm_up: int = 0, cool_down: int = 0
    ) -> SimulatedRun:
        """Serve the traffic in virtual time, on a fresh engine."""
        engine = SimulatedEngine(self.limits, policy, self.tables, rolls=self.rolls)
        measured = measure(
            engine, traffic, seed=0, warm_up=warm_up, cool_down=cool_down, clock=engine.clock
        )
        stats, seconds = engine.stats(), engine.clock.now_s()
        return SimulatedRun(
            measured.summary, measured.counters, stats.device_s / seconds, stats.host_s / seconds
        )


def with_rolling(tables: CostTables, hop_s: float) -> CostTables:
    """Tables in which a layer of a ROLLING step takes so much longer than one of DEVICE_ONLY."""
    linear, per_step = tables.linear[Mode.DEVICE_ONLY], tables.per_step[Mode.DEVICE_ONLY]
    rolling = Table1(linear.xs, tuple(seconds + hop_s for seconds in linear.ys))
    return dataclasses.replace(
        tables,
        linear={**tables.linear, Mode.ROLLING: rolling},
        per_step={**tables.per_step, Mode.ROLLING: per_step},
    )


def describe(
    machine: Machine,
    model: ModelConfig,
    *,
    device_kv_tokens: int | None = None,
    host_kv_tokens: int | None = None,
    limits: Limits | None = None,
    kernel: HostKernel = NEOJAX_KERNEL,
    efficiency: Efficiency = EFFICIENCY,
) -> Scenario:
    """The scenario of a machine that is described, not measured.

    KV tokens default to what the machine's memories hold. Raises ValueError where the model or
    the KV asked for does not fit the device.
    """
    roofline = Roofline(machine, model, kernel=kernel, efficiency=efficiency)
    limits = limits or Limits()
    device = roofline.device_kv_tokens if device_kv_tokens is None else device_kv_tokens
    host = roofline.host_kv_tokens if host_kv_tokens is None else host_kv_tokens
    memory = machine.num_devices * machine.device_memory
    need = roofline.weight_bytes + device * roofline.kv_token_bytes
    if need > memory:
        raise ValueError(
            f"{model.name} and {device} tokens of KV take {need / 1e9:.1f} GB; the device memory "
            f"of {machine.name} is {memory / 1e9:.1f} GB"
        )
    tables = roofline.tables(limits.max_num_batched_tokens, max(device, host, 1))
    return Scenario(tables, limits.of_pools(device, host, model.num_layers))
