"""An engine without a device: the real scheduler, and a clock that steps advance.

It has the interface of `engine.core.EngineCore` as far as benchmarks use it, and its loop: two
steps in flight, a step's tokens read when the next one has been launched.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque

from neojax.plan.lanes import StepTimes, rolling_step_times, step_times
from neojax.sampling_params import SamplingParams
from neojax.scheduler.costs import CostTables
from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.plan import Mode, Plan
from neojax.scheduler.policy import load_policy
from neojax.scheduler.prediction import Load
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.scheduler import Scheduler

MAX_STEPS_IN_FLIGHT = 2


class VirtualClock:
    """Time that passes only when a step takes it or somebody waits."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        """Seconds since the start."""
        return self.time_s

    def wait_until(self, at_s: float) -> None:
        """Go there, unless it is past."""
        self.time_s = max(self.time_s, at_s)


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedTokens:
    """A token of one request, as `engine.report.RequestTokens` has it."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None
    placement: str
    message: None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedStep:
    """What one call of `step` did."""

    plan: Plan | None
    outputs: list[SimulatedTokens]


@dataclasses.dataclass(slots=True)
class SimulatedStats:
    """Counters, as `engine.report.EngineStats` has them."""

    steps_device_only: int = 0
    steps_pipelined: int = 0
    steps_rolling: int = 0
    num_preemptions: int = 0
    requests_placed_host: int = 0
    steps_lost: int = 0
    steps_lost_s: float = 0.0
    device_s: float = 0.0  # for so long the device worked
    host_s: float = 0.0  # for so long the host's cores attended


class SimulatedEngine:
    """Serves requests in virtual time: steps cost what the tables say."""

    vocab_size = 1

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: str,
        tables: CostTables,
        *,
        rolls: bool = False,
        believed: CostTables | None = None,
    ) -> None:
        """rolls: whether a policy that can do without ROLLING steps has them too.

        believed: what the scheduler takes for the costs, where not what steps do take.
        """
        self.clock = VirtualClock()
        self.tables = tables
        loaded = load_policy(policy)
        if not (loaded.needs_rolling or rolls):
            limits = dataclasses.replace(limits, rolling_rows=0)
        self.scheduler = Scheduler(limits, loaded, believed or tables)
        self._arrivals = itertools.count()
        self._in_flight: deque[tuple[Plan, float, StepTimes]] = deque()
        self._device_free_s = 0.0
        self._device_s = self._host_s = self._lost_s = 0.0
        self._steps_lost = 0
        self._steps = dict.fromkeys(Mode, 0)
        # Rows and contexts of the groups under way in ROLLING steps, one per layer.
        self._groups: deque[tuple[int, int]] = deque(maxlen=tables.num_layers)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_requests or bool(self._in_flight)

    def add_request(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        """Queue a request. Raises ValueError when it could never run."""
        room = self.scheduler.limits.max_model_len - len(prompt_ids)
        self.scheduler.add(
            Request(
                request_id=request_id,
                prompt_ids=prompt_ids,
                params=params,
                max_tokens=min(params.max_tokens or room, max(1, room)),
                stop_ids=frozenset(),
                seed=0,
                arrival=next(self._arrivals),
            )
        )

    def abort(self, request_id: str) -> None:
        """Forget a request, if known."""
        self.scheduler.abort(request_id)

    def set_policy(self, name: str) -> None:
        """Change the policy while idle."""
        assert not self.has_work
        self.scheduler.set_policy(load_policy(name))

    def set_block_limit(self, limit: int | None) -> None:
        """Change how many device blocks may be in use, while idle."""
        assert not self.has_work
        self.scheduler.pools[Placement.DEVICE].set_limit(limit)

    def step(self) -> SimulatedStep:
        """Launch the next step if one can run, and read the oldest in flight when due.

        Raises RuntimeError when requests wait and nothing can run, ValueError when the tables do
        not know the step's mode.
        """
        plan = None
        if len(self._in_flight) < MAX_STEPS_IN_FLIGHT:
            plan = self.scheduler.schedule()
        if plan is not None:
            self._steps[plan.mode] += 1
            start_s = max(self.clock.now_s(), self._device_free_s)
            times = self._times(plan)
            self._device_free_s = start_s + times.seconds
            self._device_s += times.device_s
            self._host_s += times.host_s
            alone = None if plan.prediction is None else plan.prediction.device_only_s
            if alone is not None and times.seconds > alone:
                self._steps_lost += 1
                self._lost_s += times.seconds - alone
            self._in_flight.append((plan, self._device_free_s, times))
            if len(self._in_flight) < MAX_STEPS_IN_FLIGHT:
                return SimulatedStep(plan, [])
        if not self._in_flight:
            if self.scheduler.has_requests:
                raise RuntimeError("requests wait, nothing runs and nothing can be scheduled")
            return SimulatedStep(None, [])
        done, end_s, took = self._in_flight.popleft()
        self.clock.wait_until(end_s)
        self.scheduler.observe(done, took.seconds, took.host_s)
        advanced = self.scheduler.update(done, [0] * len(done.sampled_rows))
        placements = {row.request: row.placement for row in done.sampled_rows}
        return SimulatedStep(
            plan,
            [
                SimulatedTokens(r.request_id, [0], r.finish_reason, placements[r].value)
                for r in advanced
            ],
        )

    def _times(self, plan: Plan) -> StepTimes:
        if plan.mode not in self.tables.linear:
            raise ValueError(f"the cost tables know no steps of mode {plan.mode}")
        if plan.mode is not Mode.ROLLING:
            return step_times(plan, self.tables)
        entering = plan.rolling.entering
        self._groups.append((len(entering), sum(row.stop for row in entering)))
        rows = self.scheduler.limits.rolling_rows
        return rolling_step_times(Load.of(plan.b0), rows, self._groups, self.tables, plan.swaps)

    def stats(self) -> SimulatedStats:
        """A snapshot of the counters."""
        return SimulatedStats(
            steps_device_only=self._steps[Mode.DEVICE_ONLY],
            steps_pipelined=self._steps[Mode.PIPELINED],
            steps_rolling=self._steps[Mode.ROLLING],
            num_preemptions=self.scheduler.num_preemptions,
            requests_placed_host=self.scheduler.num_placed[Placement.HOST],
            steps_lost=self._steps_lost,
            steps_lost_s=self._lost_s,
            device_s=self._device_s,
            host_s=self._host_s,
        )
