"""`python -m neojax.bench sweep`: policies x KV limits x workloads on one engine.

Every run is a JSON line as soon as it ends. The same command again goes on where the file stops;
`--report` prints the table of a file without running anything. All cells are measured once before
any is repeated, in the order given, so that what is there when time runs out covers the most.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from neojax.bench.arrivals import make_traffic
from neojax.bench.measure import hardware, measure
from neojax.bench.sweep_table import sweep_table
from neojax.bench.throughput import build
from neojax.bench.workload import parse_workload
from neojax.cli import parse
from neojax.config import EngineConfig

PROG = "python -m neojax.bench sweep"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig(EngineConfig):
    """The engine's settings and what is swept."""

    cells: str = "all:64/32"
    """What is measured, a list of LIMIT:WORKLOAD. LIMIT is device KV in tokens, or all; WORKLOAD as
    in `bench throughput`. A cell that ends in =POLICY+POLICY has policies of its own."""
    policies: str = "device-only,auto"
    """Offload policies of every cell, a list. The engine is built with auto's pools."""
    arrivals: str = "all"
    """How requests arrive: all, closed:CLIENTS, poisson:RATE, gamma:RATE:CV."""
    num_requests: int = 100
    """Requests of a run."""
    warm_up: int = 0
    """Leave so many requests of each run out: the first by sending for latencies, by completion
    for rates."""
    repeats: int = 3
    """Runs of every cell and policy, with seeds that follow --seed; the order of the policies
    alternates."""
    max_run_s: float = math.inf
    """Abort what is left of a run after so many seconds."""
    time_budget_s: float = math.inf
    """Begin no run that would probably end later than this after the engine is ready."""
    output: Path = Path("sweep.jsonl")
    """Append one JSON line per run to this file; what it already holds is not run again."""
    report: bool = False
    """Only print the table of --output."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One point of the sweep."""

    limit_tokens: int | None  # device KV in use at most; None for all there is
    workload: str
    policies: tuple[str, ...]

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        return f"{'all' if self.limit_tokens is None else self.limit_tokens}:{self.workload}"


def parse_cells(text: str, policies: str) -> list[Cell]:
    """The cells of `--cells`. Raises ValueError for one that cannot be."""
    cells = []
    for item in text.split(","):
        point, _, own = item.partition("=")
        limit, _, workload = point.partition(":")
        parse_workload(workload)
        if limit != "all" and not (limit.isdecimal() and int(limit)):
            raise ValueError(f"cell {item!r}: the limit must be a number of tokens, or all")
        names = own.split("+") if own else policies.split(",")
        cells.append(Cell(None if limit == "all" else int(limit), workload, tuple(names)))
    return cells


def main(argv: list[str]) -> int:
    """Run what the output file lacks, and print its table."""
    config = parse(argv, SweepConfig, prog=PROG, positional=None)
    try:
        cells = parse_cells(config.cells, config.policies)
        make_traffic(parse_workload(cells[0].workload), config.arrivals, 1, 0)
        if not config.report:
            _run(config, cells)
        lines = _read(config.output)
    except ValueError as error:
        sys.exit(f"{PROG}: error: {error}")
    if lines:
        print(sweep_table(lines))
    return 0


def _run(config: SweepConfig, cells: list[Cell]) -> None:
    settings = _settings(config)
    todo = []
    for repeat in range(config.repeats):
        for cell in cells:
            order = cell.policies if repeat % 2 == 0 else cell.policies[::-1]
            todo += [(cell, policy, repeat) for policy in order]
    done = {
        (line["cell"], line["policy"], line["repeat"])
        for line in _read(config.output)
        if line["settings"] == settings
    }
    todo = [item for item in todo if (item[0].name, item[1], item[2]) not in done]
    if not todo:
        return
    engine = build(config, "auto")
    begun_s = time.monotonic()
    took_s: dict[tuple[str, str], float] = {}
    for number, (cell, policy, repeat) in enumerate(todo, 1):
        elapsed_s = time.monotonic() - begun_s
        if elapsed_s + took_s.get((cell.name, policy), 0.0) > config.time_budget_s:
            continue
        engine.set_policy(policy)
        limit = cell.limit_tokens
        engine.set_block_limit(None if limit is None else limit // config.block_size)
        seed = config.seed + repeat
        traffic = make_traffic(
            parse_workload(cell.workload), config.arrivals, config.num_requests, seed
        )
        label = f"{number}/{len(todo)} {cell.name} {policy}"
        run_s = time.monotonic()
        try:
            measured = measure(
                engine, traffic, seed=seed, warm_up=config.warm_up, max_s=config.max_run_s,
                progress=label,
            )  # fmt: skip
        finally:
            took_s[cell.name, policy] = time.monotonic() - run_s
        line = {
            "cell": cell.name,
            "policy": policy,
            "repeat": repeat,
            "settings": settings,
            "hardware": hardware(),
            **dataclasses.asdict(measured),
        }
        with config.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        rate, seconds = measured.summary.requests_per_s, measured.summary.seconds
        print(f"{label}, repeat {repeat}: {rate:.2f} req/s in {seconds:.1f} s", flush=True)
    engine.close()


def _settings(config: SweepConfig) -> dict[str, Any]:
    """What must be equal for two runs to be compared."""
    sweep = {field.name for field in dataclasses.fields(SweepConfig)}
    engine = {field.name for field in dataclasses.fields(EngineConfig)}
    names = (engine - {"offload_policy"}) | {"arrivals", "num_requests", "warm_up"}
    assert names <= sweep
    return {name: getattr(config, name) for name in sorted(names)}


def _read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; none when there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path} is not a file of JSON lines: {error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
