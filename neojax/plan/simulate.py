"""`python -m neojax.plan.simulate`: policies on a machine that is described or was measured.

The scheduler is the engine's own; steps take what cost tables say, lane by lane and layer by layer.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Literal

from neojax.bench.load import LoadConfig
from neojax.bench.report import (
    PLACEMENT_HEADER,
    SUMMARY_HEADER,
    placement_cells,
    summary_cells,
    table,
)
from neojax.cli import parse
from neojax.plan.machine import EFFICIENCY, HOST_KERNELS, resolve_machine
from neojax.plan.model_sizes import resolve_model
from neojax.plan.scenario import Limits, Scenario, SimulatedRun, describe, with_rolling
from neojax.scheduler.costs import CostTables

PROG = "python -m neojax.plan.simulate"
BASELINE = "device-only"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScenarioConfig(LoadConfig):
    """The machine, the model and the load."""

    machine: str = "h200"
    """A machine by name (an unknown one lists them), or a JSON file with data-sheet figures."""
    model: str = "llama-3.1-8b"
    """llama-2-7b, llama-3.1-8b, llama-3.1-70b, or any checkpoint: path or Hugging Face id."""
    tables: Path | None = None
    """Measured cost tables (JSON) instead of the machine's data sheet; then both KV sizes are
    needed."""
    device_kv_tokens: int | None = None
    """Tokens in the device pool. Default: what the machine's memory holds."""
    host_kv_tokens: int | None = None
    """Tokens in the host pool. Default: three quarters of the host's memory."""
    host_kernel: Literal["neojax", "neo"] = "neojax"
    """Whose host attention kernel: this project's, or the paper's."""
    arrivals: str = "all"
    """How requests arrive: all, closed:CLIENTS, poisson:RATE, gamma:RATE:CV, steady:CLIENTS,
    trace:FILE."""
    max_num_seqs: int = 256
    """Most sequences in one step."""
    max_num_batched_tokens: int = 2048
    """Most tokens in one step."""
    max_model_len: int = 8192
    """Longest prompt plus output."""
    rolling_rows: int | None = None
    """Host rows of each layer's group in ROLLING steps, which auto may then choose. Default: 32
    under policies that need such steps, else none."""
    rolling_hop_us: float | None = None
    """What a layer of a ROLLING step takes longer than one of a DEVICE_ONLY step. Default: what the
    tables say."""
    tpot_slo_ms: float = 500.0
    """Time per output token of requests on the host up to which auto plans for them."""
    rotate_residency: int = 0
    """Steps of a turn on the device, where requests take turns there; 0: they do not."""
    seed: int = 0
    """Seed of lengths and arrivals."""

    def scenario(self) -> Scenario:
        """What is simulated. Raises ValueError for what cannot be."""
        scenario = self._machine()
        if self.rolling_hop_us is None:
            return scenario
        tables = with_rolling(scenario.tables, self.rolling_hop_us / 1e6)
        return dataclasses.replace(scenario, tables=tables)

    def _machine(self) -> Scenario:
        rolls = bool(self.rolling_rows)
        limits = Limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            rolling_rows=Limits().rolling_rows if self.rolling_rows is None else self.rolling_rows,
            tpot_slo_s=self.tpot_slo_ms / 1e3,
            rotate_steps=self.rotate_residency,
        )
        if self.tables is None:
            described = describe(
                resolve_machine(self.machine),
                resolve_model(self.model),
                device_kv_tokens=self.device_kv_tokens,
                host_kv_tokens=self.host_kv_tokens,
                limits=limits,
                kernel=HOST_KERNELS[self.host_kernel],
            )
            return dataclasses.replace(described, rolls=rolls)
        if self.device_kv_tokens is None or self.host_kv_tokens is None:
            raise ValueError("--tables needs --device-kv-tokens and --host-kv-tokens")
        try:
            tables = CostTables.from_json(self.tables.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"--tables {self.tables} cannot be read: {error}") from error
        pools = self.device_kv_tokens, self.host_kv_tokens
        return Scenario(tables, limits.of_pools(*pools, tables.num_layers), rolls)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateConfig(ScenarioConfig):
    """The machine, the model, the load and the policies to compare."""

    policies: str = "device-only,auto"
    """Offload policies, a list; each is also shown beside device-only where that is among them."""


def main(argv: list[str]) -> int:
    """Simulate and print a table."""
    config = parse(argv, SimulateConfig, prog=PROG, positional=None)
    try:
        scenario = config.scenario()
        traffic = config.traffic(config.arrivals, config.seed)
        results = {
            policy: scenario.run(policy, traffic, config.warm_up)
            for policy in config.policies.split(",")
        }
    except ValueError as error:
        sys.exit(f"{PROG}: error: {error}")
    print(headline(config, scenario, traffic.name) + "\n")
    print(policy_table(results))
    if config.output is not None:
        report = {policy: dataclasses.asdict(result) for policy, result in results.items()}
        Path(config.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def headline(config: ScenarioConfig, scenario: Scenario, traffic: str) -> str:
    """What the figures are of, and the constants that they rest on."""
    limits = scenario.limits
    source = f"measured tables {config.tables}" if config.tables else config.machine
    lines = [
        f"{source}, {config.model}, {traffic}; KV tokens: device "
        f"{limits.num_device_blocks * limits.block_size:,}, host "
        f"{limits.num_host_blocks * limits.block_size:,}"
    ]
    if config.tables is None:
        constants = dataclasses.asdict(EFFICIENCY)
        lines.append(", ".join(f"{name} {value:g}" for name, value in constants.items()))
        lines.append(f"host kernel {HOST_KERNELS[config.host_kernel].name}")
    return "\n".join(lines)


def policy_table(results: dict[str, SimulatedRun]) -> str:
    """A row for each policy."""
    base = results.get(BASELINE)
    rows = []
    for policy, run in results.items():
        rate, counters = run.summary.requests_per_s, run.counters
        rows.append(
            [
                policy,
                *summary_cells(run.summary),
                *placement_cells(run.summary),
                "-" if base is None else f"{rate / base.summary.requests_per_s:.3f}",
                f"{counters.steps_device_only}/{counters.steps_pipelined}/{counters.steps_rolling}",
                f"{run.device_share:.0%}/{run.host_share:.0%}",
            ]
        )
    header = (
        "policy", *SUMMARY_HEADER, *PLACEMENT_HEADER, f"x {BASELINE}",
        "steps device/pipelined/rolling", "busy device/host",
    )  # fmt: skip
    return table(header, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
