"""`python -m neojax.plan.survey`: policies on random machines under random loads.

Looks for machines on which a policy loses: a promise such as "never worse than device-only" is
worth what it is worth on machines that nobody thought of.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from neojax.bench.arrivals import Traffic, make_traffic
from neojax.bench.report import table
from neojax.bench.workload import WORKLOADS, parse_workload
from neojax.cli import parse
from neojax.plan.machine import GB, Machine
from neojax.plan.model_sizes import MODELS
from neojax.plan.roofline import Roofline
from neojax.plan.scenario import Limits, Scenario, describe

PROG = "python -m neojax.plan.survey"
HELD, FLOOR = 0.995, 0.97
"""A policy holds against another at the first ratio of requests per second, and loses badly below
the second."""
QUANTILES = (0, 1, 5, 25, 50, 75, 95, 100)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurveyConfig:
    """How many cells, and of which policies."""

    cells: int = 200
    """Random machines with a random load each."""
    policies: str = "device-only,neo,auto"
    """Policies to compare, a list; the last is held against each of the others."""
    seed: int = 0
    """Seed of machines and loads."""
    only: str | None = None
    """Only these cells of the survey, by number, a list."""
    output: Path | None = None
    """Write one JSON line per cell to this file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A machine, a model, a capped KV pool and a load."""

    number: int
    machine: Machine
    model: str
    device_kv_tokens: int
    host_kv_tokens: int
    workload: str
    clients: int
    max_num_batched_tokens: int

    def scenario(self) -> Scenario:
        """What is simulated."""
        limits = Limits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=16_384,
            tpot_slo_s=math.inf,  # the other policies know no such limit
        )
        return describe(
            self.machine,
            MODELS[self.model],
            device_kv_tokens=self.device_kv_tokens,
            host_kv_tokens=self.host_kv_tokens,
            limits=limits,
        )

    def traffic(self) -> Traffic:
        """A closed loop that keeps the engine saturated, the same for every policy.

        Requests that the device pool could never hold are left out: device-only refuses them.
        """
        form = f"closed:{self.clients}"
        drawn = make_traffic(parse_workload(self.workload), form, 3 * self.clients, self.number)
        fitting = tuple(n for n in drawn.lengths if sum(n) <= self.device_kv_tokens)
        return dataclasses.replace(drawn, lengths=fitting)

    def words(self) -> str:
        """In one line."""
        m = self.machine
        return (
            f"{self.number}: {m.device_flops / 1e12:.0f} TFLOP/s, {m.device_bandwidth / GB:.0f} "
            f"GB/s, link {m.host_link / GB:.0f}, host {m.host_cores} cores "
            f"{m.host_bandwidth / GB:.0f} GB/s, {self.model}, KV {self.device_kv_tokens}, "
            f"{self.workload}, {self.clients} clients, {self.max_num_batched_tokens} tokens a step"
        )


def draw_cell(number: int, seed: int) -> Cell:
    """A machine between a small card with a small host and the largest, under any load."""
    rng = random.Random(f"{seed} {number}")

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    size = rng.random()  # faster arithmetic comes with faster memory
    model = rng.choice(("llama-2-7b", "llama-3.1-8b"))
    cores = round(between(4, 64))
    machine = Machine(
        name=f"random {number}",
        device_flops=60e12 * (1000 / 60) ** size * between(0.7, 1.4),
        device_bandwidth=300 * GB * (4800 / 300) ** size * between(0.7, 1.4),
        device_memory=200e9,
        host_link=between(8, 64) * GB,
        host_cores=cores,
        host_bandwidth=cores * between(4, 20) * GB,
        host_memory=256e9,
    )
    tokens_in, tokens_out = round(between(50, 3000)), round(between(10, 400))
    synthetic = f"{tokens_in}/{tokens_out}~0.2"
    workload = rng.choice((*WORKLOADS, synthetic, synthetic, synthetic))
    room = Roofline(machine, MODELS[model]).host_kv_tokens
    device_kv_tokens = round(between(2_000, 200_000)) // 16 * 16
    if workload == synthetic:  # at least a longest request fits
        device_kv_tokens = max(device_kv_tokens, (tokens_in + tokens_out) * 6 // 5 // 16 * 16 + 32)
    return Cell(
        number=number,
        machine=machine,
        model=model,
        device_kv_tokens=device_kv_tokens,
        host_kv_tokens=min(room, round(between(10_000, 400_000))),
        workload=workload,
        clients=round(between(16, 128)),
        max_num_batched_tokens=rng.choice((512, 2048, 4096)),
    )


def main(argv: list[str]) -> int:
    """Simulate the cells and print how the last policy fares."""
    config = parse(argv, SurveyConfig, prog=PROG, positional=None)
    policies = config.policies.split(",")
    numbers = map(int, config.only.split(",")) if config.only else range(config.cells)
    cells = [draw_cell(number, config.seed) for number in numbers]
    rates: list[dict[str, float]] = []
    for cell in tqdm(cells, desc="Simulating"):
        scenario, traffic = cell.scenario(), cell.traffic()
        ends = len(traffic.lengths) // 5  # the engine fills up, and drains
        runs = {policy: scenario.run(policy, traffic, ends, ends) for policy in policies}
        rates.append({policy: run.summary.requests_per_s for policy, run in runs.items()})
        if config.output is not None:
            line: dict[str, Any] = {"cell": dataclasses.asdict(cell)}
            line |= {policy: dataclasses.asdict(run) for policy, run in runs.items()}
            with config.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    print(report(cells, rates, policies))
    return 0


def report(
    cells: Sequence[Cell], rates: Sequence[dict[str, float]], policies: Sequence[str]
) -> str:
    """The distribution of the last policy's rate over each other's, and the cells it loses."""
    last = policies[-1]
    rows, lost = [], []
    for other in policies[:-1]:
        ratios = [rate[last] / rate[other] for rate in rates]
        held = sum(ratio >= HELD for ratio in ratios) / len(ratios)
        badly = sum(ratio < FLOOR for ratio in ratios)
        quantiles = np.percentile(ratios, QUANTILES)
        rows.append(
            [f"{last}/{other}", *(f"{q:.3f}" for q in quantiles), f"{held:.1%}", str(badly)]
        )
        lost += [
            f"{last}/{other} {ratio:.3f} in {cell.words()}"
            for cell, ratio in zip(cells, ratios, strict=True)
            if ratio < HELD
        ]
    header = ("", *(f"p{q}" for q in QUANTILES), f">= {HELD}", f"< {FLOOR}")
    return "\n".join([table(header, rows), *lost])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
