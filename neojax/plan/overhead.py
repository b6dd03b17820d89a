"""`python -m neojax.plan.overhead`: how long the scheduler itself takes to plan a step.

The engine plans a step while the device computes the one before it, so planning is free as long as
it is shorter. No device is needed: the real scheduler plans for a machine that is described, and
every step counts as completed before the next is planned. Processor time is what is measured, so
other programs of the machine hardly count.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Sequence

from neojax.bench.report import table
from neojax.cli import parse
from neojax.plan.machine import resolve_machine
from neojax.plan.model_sizes import resolve_model
from neojax.plan.scenario import Limits, describe
from neojax.sampling_params import SamplingParams
from neojax.scheduler.costs import CostTables
from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.policy import OffloadPolicy, load_policy
from neojax.scheduler.request import Request, RequestState
from neojax.scheduler.scheduler import Scheduler

PROG = "python -m neojax.plan.overhead"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverheadConfig:
    """Whose planning, and of how many requests."""

    policies: str = "device-only,auto,neo,full,rolling"
    """Offload policies, a list; `module:Class` for one of your own."""
    num_running: int = 256
    """Requests that run at a time."""
    num_waiting: int = 256
    """Requests that wait, in the rows of the table where any do."""
    rolling_rows: int = 8
    """Host rows of a group, in the rows of the table with ROLLING steps."""
    prompt_tokens: int = 200
    """Mean length of a prompt."""
    output_tokens: int = 100
    """Mean length of an output. Where nobody waits outputs are so long that nobody finishes."""
    machine: str = "t4-g4dn.4xlarge"
    """A machine by name (an unknown one lists them), or a JSON file with data-sheet figures."""
    model: str = "llama-2-7b"
    """llama-2-7b, llama-3.1-8b, llama-3.1-70b, or any checkpoint: path or Hugging Face id."""
    steps: int = 500
    """Steps that are measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds of each call, and what the plans held in the mean."""

    plan_s: list[float]
    update_s: list[float]
    device_rows: float
    host_rows: float
    chunk_tokens: float


class _Crowd:
    """Requests without end: half of them prefer the host where the policy lets them live there."""

    def __init__(self, policy: OffloadPolicy, config: OverheadConfig, max_model_len: int) -> None:
        self._numbers = itertools.count()
        self._random = random.Random(0)
        self._placements = [p.value for p in policy.placements]
        self._prompt_tokens = config.prompt_tokens
        self._output_tokens = config.output_tokens
        self._room = max_model_len

    def one(self, *, is_endless: bool) -> Request:
        """The next request."""
        number = next(self._numbers)
        num_prompt = round(self._prompt_tokens * self._random.uniform(0.5, 1.5))
        num_output = round(self._output_tokens * self._random.uniform(0.5, 1.5))
        placement = self._placements[number % len(self._placements)]
        params = SamplingParams(kv_placement=placement)  # pyright: ignore[reportArgumentType]
        return Request(
            request_id=str(number),
            prompt_ids=[1] * num_prompt,
            params=params,
            max_tokens=self._room - num_prompt if is_endless else max(1, num_output),
            stop_ids=frozenset(),
            seed=0,
            arrival=number,
        )


def measure(
    policy: OffloadPolicy, limits: SchedulerLimits, tables: CostTables, config: OverheadConfig,
    *, num_waiting: int,
) -> Overhead:  # fmt: skip
    """Plan `config.steps` steps, once as many requests run as should."""
    scheduler = Scheduler(limits, policy, tables)
    crowd = _Crowd(policy, config, limits.max_model_len)
    for _ in range(config.num_running + num_waiting):
        scheduler.add(crowd.one(is_endless=not num_waiting))
    plan_s: list[float] = []
    update_s: list[float] = []
    rows: list[tuple[int, int, int]] = []  # the plans themselves would be work for the collector
    while len(rows) < config.steps:
        is_full = len(scheduler.running) == config.num_running
        start_s = time.thread_time()
        plan = scheduler.schedule()
        planned_s = time.thread_time()
        if plan is None:
            raise ValueError("nothing can run: more requests than the pools hold")
        advanced = scheduler.update(plan, [0] * len(plan.sampled_rows))
        updated_s = time.thread_time()
        for request in advanced:
            if request.state is RequestState.FINISHED:
                scheduler.add(crowd.one(is_endless=False))
        if rows or is_full:
            b0, b1 = plan.b0, plan.b1
            num_host = sum(map(len, (b0.host_decodes, b1.host_decodes, plan.rolling.leaving)))
            rows.append((len(b0.decodes), num_host, sum(row.num_tokens for row in b0.chunks)))
            plan_s.append(planned_s - start_s)
            update_s.append(updated_s - planned_s)
    device, host, chunk_tokens = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    return Overhead(plan_s, update_s, device, host, chunk_tokens)


def main(argv: list[str]) -> int:
    """Measure and print a table."""
    config = parse(argv, OverheadConfig, prog=PROG, positional=None)
    try:
        longest = config.prompt_tokens * 3 // 2 + max(config.steps, config.output_tokens) * 4
        tokens = config.num_running * longest
        scenario = describe(
            resolve_machine(config.machine),
            resolve_model(config.model),
            device_kv_tokens=0,
            host_kv_tokens=tokens,
            limits=Limits(max_num_seqs=config.num_running, max_model_len=longest),
        )
        # More than such a machine has: what is asked is how long its planning would take.
        limits = dataclasses.replace(
            scenario.limits, num_device_blocks=scenario.limits.num_host_blocks
        )
        rows = []
        for name, rolling_rows, num_waiting in itertools.product(
            config.policies.split(","), (0, config.rolling_rows), (0, config.num_waiting)
        ):
            policy = load_policy(name)
            if not rolling_rows and policy.needs_rolling:
                continue
            o = measure(
                policy,
                dataclasses.replace(limits, rolling_rows=rolling_rows),
                scenario.tables,
                config,
                num_waiting=num_waiting,
            )
            rows.append([name, str(rolling_rows), str(num_waiting), *_cells(o)])
    except ValueError as error:
        sys.exit(f"{PROG}: error: {error}")
    print(f"{config.num_running} requests on {config.machine}, {config.model}; milliseconds")
    header = ("policy", "group", "waiting", "device rows", "host rows", "prefill", "plan p50",
              "p99", "update p50", "p99")  # fmt: skip
    print(table(header, rows))
    return 0


def _cells(o: Overhead) -> list[str]:
    loads = (o.device_rows, o.host_rows, o.chunk_tokens)
    quantiles = (q for seconds in (o.plan_s, o.update_s) for q in _p50_p99(seconds))
    return [*(f"{load:.0f}" for load in loads), *(f"{1e3 * q:.2f}" for q in quantiles)]


def _p50_p99(seconds: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
