"""One measured run of an engine: latencies and rates, and what the scheduler did meanwhile."""

from __future__ import annotations

import dataclasses
import math
import platform
from pathlib import Path
from typing import Protocol

from neojax.bench.arrivals import Traffic
from neojax.bench.driver import Clock, Engine, drive
from neojax.bench.metrics import Summary, summarise


class Stats(Protocol):
    """The counters read, as `engine.report.EngineStats` has them."""

    @property
    def steps_device_only(self) -> int: ...
    @property
    def steps_pipelined(self) -> int: ...
    @property
    def steps_rolling(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def requests_placed_host(self) -> int: ...
    @property
    def steps_lost(self) -> int: ...
    @property
    def steps_lost_s(self) -> float: ...


class CountingEngine(Engine, Protocol):
    """An engine that also counts."""

    def stats(self) -> Stats: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Counters:
    """What the engine counted during a run."""

    steps_device_only: int
    steps_pipelined: int
    steps_rolling: int
    num_preemptions: int
    requests_placed_host: int
    steps_lost: int  # steps with host rows that the device alone would have done faster
    steps_lost_s: float  # seconds that these took longer

    @classmethod
    def between(cls, before: Stats, after: Stats) -> Counters:
        """The difference of two snapshots."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(after, name) - getattr(before, name) for name in names})


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """A run's summary and counters."""

    summary: Summary
    counters: Counters


def measure(
    engine: CountingEngine,
    traffic: Traffic,
    *,
    seed: int,
    warm_up: int = 0,
    cool_down: int = 0,
    clock: Clock | None = None,
    max_s: float = math.inf,
    progress: str | None = None,
) -> Measurement:
    """Serve the traffic once (see `driver.drive` and `metrics.summarise`)."""
    before = engine.stats()
    run = drive(engine, traffic, seed=seed, clock=clock, max_s=max_s, progress=progress)
    summary = summarise(run.records, start_s=run.start_s, warm_up=warm_up, cool_down=cool_down)
    return Measurement(summary, Counters.between(before, engine.stats()))


def hardware() -> str:
    """The device, the host's cores and jax's version, in words. Starts jax's backend."""
    import jax

    device = jax.devices()[0]
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cpu = models[0] if models else platform.machine()
    return f"{device.device_kind}, {len(models)} x {cpu}, jax {jax.__version__}"
