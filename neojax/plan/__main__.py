"""`python -m neojax.plan`: what fits a machine, and whether its host would help.

Weights and KV by their bytes; throughput by simulating the load under device-only and auto.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys

from neojax.bench.arrivals import Traffic
from neojax.cli import parse
from neojax.plan.machine import HOST_KERNELS, resolve_machine
from neojax.plan.model_sizes import resolve_model
from neojax.plan.roofline import Roofline
from neojax.plan.scenario import Scenario, SimulatedRun
from neojax.plan.simulate import BASELINE, ScenarioConfig, headline, policy_table

PROG = "python -m neojax.plan"
GAIN_THAT_COUNTS = 0.02
BUSY = 0.85
"""A lane that works for so much of the time is what limits a run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(ScenarioConfig):
    """A model, a machine and a load: what fits, which policy wins, by how much, what limits it."""

    workload: str = "1000/100"
    """Lengths: ac, azure-conv, osc, osc-normal, IN/OUT tokens, or IN/OUT~0.1 within ±10 %."""


def main(argv: list[str]) -> int:
    """Print the plan."""
    config = parse(argv, PlanConfig, prog=PROG)
    try:
        scenario = config.scenario()
        traffic = config.traffic(config.arrivals, config.seed)
        print(headline(config, scenario, traffic.name))
        print(_room(config, scenario, traffic) + "\n")
        runs = {
            policy: scenario.run(policy, traffic, config.warm_up) for policy in (BASELINE, "auto")
        }
    except ValueError as error:
        sys.exit(f"{PROG}: error: {error}")
    print(policy_table(runs) + "\n")
    print(verdict(runs[BASELINE], runs["auto"]))
    return 0


def _room(config: ScenarioConfig, scenario: Scenario, traffic: Traffic) -> str:
    """What fits: bytes where the machine is described, contexts and requests at once."""
    lines = []
    if config.tables is None:
        machine = resolve_machine(config.machine)
        kernel = HOST_KERNELS[config.host_kernel]
        roofline = Roofline(machine, resolve_model(config.model), kernel=kernel)
        lines.append(
            f"weights {roofline.weight_bytes / 1e9:.1f} GB of "
            f"{machine.num_devices * machine.device_memory / 1e9:.0f}; KV cache "
            f"{roofline.kv_token_bytes / 1024:.0f} KiB a token"
        )
    mean = statistics.fmean(lengths.input + lengths.output for lengths in traffic.lengths)
    limits = scenario.limits
    for name, blocks in (("device", limits.num_device_blocks), ("host", limits.num_host_blocks)):
        tokens = blocks * limits.block_size
        lines.append(
            f"{name:6} {tokens:9,} tokens: {tokens / mean:8.1f} requests of {mean:.0f} at once, "
            f"context up to {min(tokens, limits.max_model_len):,}"
        )
    return "\n".join(lines)


def verdict(baseline: SimulatedRun, auto: SimulatedRun) -> str:
    """Which policy wins, and what it is bound by, in a sentence or two."""
    gain = auto.summary.requests_per_s / baseline.summary.requests_per_s - 1
    if gain >= GAIN_THAT_COUNTS:
        text = f"The host helps: auto serves {gain:.0%} more requests a second than device-only."
    elif gain > -GAIN_THAT_COUNTS:
        text = "The host makes no difference to throughput here."
    else:
        text = f"The host costs {-gain:.0%} here: use --offload-policy device-only."
    winner = auto if gain >= GAIN_THAT_COUNTS else baseline
    busy = [
        name
        for name, share in (("device", winner.device_share), ("host", winner.host_share))
        if share >= BUSY
    ]
    if busy:
        return (
            f"{text} The {' and the '.join(busy)} limits it: busy {BUSY:.0%} of the time or more."
        )
    return f"{text} Neither lane is busy all the time: KV memory or arrivals limit it."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
