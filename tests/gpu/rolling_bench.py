"""What ROLLING steps cost on a GPU: each is launched by the runner on rows made up for it.

Used by scripts/gpu_check; needs an engine with ROLLING programs.
"""

from __future__ import annotations

import collections
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from neojax.runner.runner import Runner
from neojax.sampling_params import SamplingParams
from neojax.scheduler.plan import Mode, Plan, Rolling, Row, SubBatch
from neojax.scheduler.request import Placement, Progress, Request, RequestState

IN_FLIGHT = 2


class Rows:
    """Decode rows over the pools' blocks. Groups share blocks: they are read layers apart."""

    def __init__(self, runner: Runner) -> None:
        self.block_size = runner.geometry.block_size
        self.num_blocks = {
            Placement.DEVICE: runner.config.num_device_blocks,
            Placement.HOST: runner.config.num_host_blocks,
        }
        self.max_context = runner.config.max_model_len - 1

    def of(self, placement: Placement, count: int, context: int, *, samples: bool) -> list[Row]:
        """`count` rows of one token each; raises ValueError where the pool is too small."""
        context = min(context, self.max_context)
        per_row = -(-(context + 1) // self.block_size)
        if count * per_row > self.num_blocks[placement]:
            raise ValueError(
                f"{count} rows of {context} tokens need {count * per_row} {placement} blocks; "
                f"there are {self.num_blocks[placement]}"
            )
        return [
            self._row(i, placement, context, range(i * per_row, (i + 1) * per_row), samples)
            for i in range(count)
        ]

    def _row(
        self, index: int, placement: Placement, context: int, blocks: Sequence[int], samples: bool
    ) -> Row:
        request = Request(
            f"{placement}{index}", [1] * (context + 1), SamplingParams(temperature=0.0),
            max_tokens=1, stop_ids=frozenset(), seed=0, arrival=index,
            state=RequestState.RUNNING, placement=placement, slot=index,
        )  # fmt: skip
        start = Progress(context, 0)
        return Row(request, start, 1, samples, index, placement, 0, tuple(blocks))


def step_ms(runner: Runner, plan: Callable[[int], Plan], warm_up: int, num_steps: int) -> float:
    """Median milliseconds between the ends of steps, some of which are in flight."""
    flying = collections.deque()
    ends = []
    for step in range(warm_up + num_steps + 1):
        flying.append(runner.enqueue(plan(step)))
        if len(flying) > IN_FLIGHT:
            flying.popleft().tokens()
            ends.append(time.perf_counter())
    for handle in flying:
        handle.tokens()
    return 1e3 * statistics.median(np.diff(ends[warm_up - IN_FLIGHT :]).tolist())


def rolling_figures(
    runner: Runner,
    budget_s: float,
    device_rows: Sequence[int],
    group_rows: Sequence[int],
    contexts: Sequence[int],
    device_context: int,
    num_steps: int = 24,
) -> dict[str, object]:
    """Steps of device rows and one group per layer, against the larger of device and host."""
    assert runner.host is not None
    rows, layers = Rows(runner), runner.geometry.num_layers
    deadline = time.monotonic() + budget_s
    points, hops = [], {}
    grid = [(d, c, context) for c in group_rows for context in contexts for d in device_rows]

    for num_device, count, context in grid:
        if time.monotonic() > deadline:
            break
        device = SubBatch(
            decodes=tuple(rows.of(Placement.DEVICE, num_device, device_context, samples=True))
        )

        def rolling(group: Sequence[Row], step: int, b0: SubBatch = device) -> Plan:
            return Plan(step, Mode.ROLLING, b0, rolling=Rolling(tuple(group), ()))

        def measured(context: int, count: int = count, rolling: Callable = rolling) -> float:
            group = rows.of(Placement.HOST, count, context, samples=False) if count else ()
            return step_ms(runner, functools.partial(rolling, group), layers + 3, num_steps)

        if num_device not in hops:
            alone = step_ms(
                runner, lambda step, b0=device: Plan(step, Mode.DEVICE_ONLY, b0), 4, num_steps
            )
            empty = measured(0, count=0)
            hops[num_device] = {"device_only_ms": alone, "empty_ms": empty,
                                "hop_us": 1e3 * (empty - alone) / layers}  # fmt: skip
            print(
                f"rolling: {num_device} device rows: DEVICE_ONLY {alone:.2f} ms, ROLLING with "
                f"empty groups {empty:.2f}: {hops[num_device]['hop_us']:.1f} us a hop",
                flush=True,
            )
        # Groups of one token's context: the device's part and the hops, with rows in them.
        device_ms = measured(1)
        step = measured(context)
        # Again with the same groups in every layer: jobs of shorter ones would count in the mean.
        before = runner.host.lane.counters()
        measured(context)
        after = runner.host.lane.counters()
        jobs = max(after["jobs"] - before["jobs"], 1)
        host_ms = layers * (after["busy_ns"] - before["busy_ns"]) / jobs / 1e6
        predicted = max(device_ms, host_ms)
        alone = hops[num_device]["device_only_ms"]
        points.append(
            {
                "device_rows": num_device, "group_rows": count, "context": context,
                "ms": step, "device_ms": device_ms, "host_ms": host_ms,
                "ratio": step / predicted, "over_device_only": step / alone,
            }
        )  # fmt: skip
        print(
            f"rolling: {num_device} device rows, groups of {count} of {context}: {step:.2f} ms; "
            f"device {device_ms:.2f}, host {host_ms:.2f}: {step / predicted:.3f}x the larger, "
            f"{step / alone:.2f}x DEVICE_ONLY",
            flush=True,
        )
    ratios = sorted(point["ratio"] for point in points)
    return {
        "hops": hops, "points": points, "median_ratio": statistics.median(ratios),
        "worst_ratio": ratios[-1],
    }  # fmt: skip
