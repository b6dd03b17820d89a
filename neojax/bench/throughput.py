"""`python -m neojax.bench throughput`: the engine under load, without HTTP.

Greedy, EOS ignored, random prompts. Policies are compared in one process, one after the other.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neojax.bench.load import LoadConfig
from neojax.bench.measure import hardware, measure
from neojax.bench.metrics import Summary, median_of
from neojax.bench.report import (
    PLACEMENT_HEADER,
    SUMMARY_HEADER,
    placement_cells,
    summary_cells,
    table,
)
from neojax.cli import parse
from neojax.config import EngineConfig

if TYPE_CHECKING:
    from neojax.engine.core import EngineCore

PROG = "python -m neojax.bench throughput"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputConfig(EngineConfig, LoadConfig):
    """The engine's settings and the load's."""

    arrivals: str = "closed:1,closed:4,closed:16"
    """How requests arrive, a list: all, closed:CLIENTS, poisson:RATE, gamma:RATE:CV,
    steady:CLIENTS, trace:FILE."""
    policies: str = "auto"
    """Offload policies to compare: a list such as device-only,full. The engine is built with the
    first; start with one that gives it host memory if another needs it."""
    repeats: int = 3
    """Runs of each measurement, with seeds that follow --seed; medians are reported."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Medians over the repeats of one policy and way of arriving."""

    policy: str
    arrivals: str
    summary: Summary
    spread: float  # (fastest - slowest) / median of output tokens per second


def main(argv: list[str]) -> int:
    """Run the benchmark and print its table."""
    config = parse(argv, ThroughputConfig, prog=PROG, positional=None)
    policies, ways = config.policies.split(","), config.arrivals.split(",")
    try:
        for way in ways:
            config.traffic(way, config.seed)
        engine = build(config, policies[0])
    except ValueError as error:
        sys.exit(f"{PROG}: error: {error}")
    results: list[Result] = []
    for policy, way in itertools.product(policies, ways):
        engine.set_policy(policy)
        summaries = []
        for repeat in range(config.repeats):
            traffic = config.traffic(way, config.seed + repeat)
            label = f"{policy} {way} {repeat + 1}/{config.repeats}"
            measured = measure(engine, traffic, seed=repeat, warm_up=config.warm_up, progress=label)
            summaries.append(measured.summary)
        median = median_of(summaries)
        rates = [summary.output_tokens_per_s for summary in summaries]
        spread = (max(rates) - min(rates)) / median.output_tokens_per_s
        results.append(Result(policy, way, median, spread))
    engine.close()
    print(f"{config.model}, {config.workload}, {hardware()}\n")
    header = ("policy, arrivals", *SUMMARY_HEADER, *PLACEMENT_HEADER, "spread")
    rows = [
        [
            f"{r.policy} {r.arrivals}",
            *summary_cells(r.summary),
            *placement_cells(r.summary),
            f"{r.spread:.1%}",
        ]
        for r in results
    ]
    print(table(header, rows))
    if config.output is not None:
        write_json(config.output, "throughput", argv, [dataclasses.asdict(r) for r in results])
    return 0


def build(config: EngineConfig, policy: str) -> EngineCore:
    """An engine of the settings that `config` shares with EngineConfig, under `policy`."""
    from neojax.engine.build import build_engine
    from neojax.hub import resolve_checkpoint

    names = [field.name for field in dataclasses.fields(EngineConfig)]
    settings: dict[str, Any] = {name: getattr(config, name) for name in names}
    settings["offload_policy"] = policy
    return build_engine(EngineConfig(**settings), resolve_checkpoint(config.model))


def write_json(path: str, benchmark: str, argv: list[str], results: Any) -> None:
    """Results beside the hardware and the command that makes them again."""
    report = {
        "hardware": hardware(),
        "command": ["python", "-m", "neojax.bench", benchmark, *argv],
        "results": results,
    }
    Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
