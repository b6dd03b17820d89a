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
from neojax.scheduler.policy import load_policy

PROG = "python -m neojax.bench sweep"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig(EngineConfig):
    """The engine's settings and what is swept."""

    cells: str = "all:64/32"
    """What is measured, a list of LIMIT:WORKLOAD. LIMIT is device KV in tokens, or all; WORKLOAD as
    in `bench throughput`. LIMIT:WORKLOAD:COUNT has so many requests, and a cell that ends in
    =POLICY+POLICY has policies of its own."""
    policies: str = "device-only,auto"
    """Offload policies of every cell, a list. The engine is built for all of them."""
    arrivals: str = "all"
    """How requests arrive: all, closed:CLIENTS, poisson:RATE, gamma:RATE:CV,
    steady:CLIENTS, a closed loop in which requests are under way already."""
    num_requests: int = 100
    """Requests of a run, where the cell does not say."""
    warm_up: int = 0
    """Leave so many requests of each run out: the first by sending for latencies, by completion
    for rates."""
    repeats: int = 3
    """Runs of every cell and policy, with seeds that follow --seed; the order of the policies
    alternates."""
    max_run_s: float = math.inf
    """Abort what is left of a run after so many seconds."""
    time_budget_s: float = math.inf
    """Begin no run that would probably end later than this after the start of the command."""
    output: Path = Path("sweep.jsonl")
    """Append one JSON line per run to this file; what it already holds is not run again."""
    report: bool = False
    """Only print the table of --output."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One point of the sweep."""

    limit_tokens: int | None  # device KV in use at most; None for all there is
    workload: str
    num_requests: int
    policies: tuple[str, ...]

    @property
    def name(self) -> str:
        """Without its policies, as it could be written on the command line."""
        limit = "all" if self.limit_tokens is None else self.limit_tokens
        return f"{limit}:{self.workload}:{self.num_requests}"


def parse_cells(config: SweepConfig) -> list[Cell]:
    """The cells of `--cells`. Raises ValueError for one that cannot be."""
    cells = []
    for item in config.cells.split(","):
        point, _, own = item.partition("=")
        limit, _, rest = point.partition(":")
        workload, _, count = rest.partition(":")
        parse_workload(workload)
        if not _is_count(limit, "all") or not _is_count(count, ""):
            raise ValueError(f"cell {item!r} is not LIMIT:WORKLOAD or LIMIT:WORKLOAD:COUNT")
        cells.append(
            Cell(
                None if limit == "all" else int(limit),
                workload,
                int(count or config.num_requests),
                tuple(own.split("+") if own else config.policies.split(",")),
            )
        )
        for policy in cells[-1].policies:
            load_policy(policy)
    return cells


def _is_count(text: str, otherwise: str) -> bool:
    return text == otherwise or (text.isdecimal() and int(text) > 0)


def main(argv: list[str]) -> int:
    """Run what the output file lacks, and print its table."""
    config = parse(argv, SweepConfig, prog=PROG, positional=None)
    try:
        cells = parse_cells(config)
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
    begun_s = time.monotonic()
    settings = _settings(config)
    _cut_unfinished_line(config.output)
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
    policies = [load_policy(policy) for cell in cells for policy in cell.policies]
    # Every policy's pools, and the programs of ROLLING steps where one takes them.
    needs_most = next((policy.name for policy in policies if policy.needs_rolling), "auto")
    engine = build(config, needs_most)
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
            parse_workload(cell.workload), config.arrivals, cell.num_requests, seed
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
    names = (engine - {"offload_policy"}) | {"arrivals", "warm_up"}
    assert names <= sweep
    return {name: getattr(config, name) for name in sorted(names)}


def _cut_unfinished_line(path: Path) -> None:
    """Drop what a run that was killed while it wrote has left: it is measured again."""
    if path.exists():
        text = path.read_bytes()
        if not text.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(text.rfind(b"\n") + 1)


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
