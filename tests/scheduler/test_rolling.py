"""ROLLING steps as the scheduler plans them: groups, their size, and when they are worth it."""

from __future__ import annotations

import dataclasses
import random
from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import initialize

from neojax.scheduler.auto import Auto
from neojax.scheduler.baselines import RollingLane
from neojax.scheduler.costs import CostTables
from neojax.scheduler.outlook import Outlook
from neojax.scheduler.plan import Mode, Plan, Prediction
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.prediction import Load, Predictor
from neojax.scheduler.request import Placement
from neojax.scheduler.rolling import STEPS_TO_ENTER, GroupSize
from neojax.scheduler.scheduler import Scheduler
from neojax.scheduler.supervision import MAX_WAIT_STEPS
from tests.scheduler.random_modes import RandomModes
from tests.scheduler.tables import h200, t4
from tests.scheduler.test_scheduler import (
    LIMITS,
    SchedulerMachine,
    make_request,
    make_scheduler,
    run_step,
    run_to_end,
)

ROLLING = dataclasses.replace(LIMITS, num_layers=3, rolling_rows=2)
LARGE = dataclasses.replace(
    LIMITS,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    max_model_len=2048,
    num_device_blocks=1000,
    num_host_blocks=40_000,
    scratch_tokens=4096,
    num_layers=32,
    rolling_rows=16,
)


class RollingMachine(SchedulerMachine):
    """Every promise of the scheduler, with groups under way."""

    max_steps = 20_000  # a token takes a step a layer, and two rows enter at a time

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(ROLLING, RollingLane())

    def check_mode(self, plan: Plan) -> None:
        assert not plan.b0.host_decodes
        assert not plan.b1
        assert len(plan.rolling.entering) <= ROLLING.rolling_rows
        has_groups = bool(plan.rolling.entering) or any(True for _ in self.scheduler.rows_under_way)
        assert plan.mode is Mode.ROLLING or not has_groups

    def check_oldest(self, plan: Plan) -> None:
        """Two rows enter at a time, and those of higher priority first."""


class ModesMachine(SchedulerMachine):
    """All modes in turn: groups parked under other steps, host rows in both ways, swaps."""

    max_steps = 20_000

    @initialize(
        seed=st.integers(0, 1000),
        change=st.sampled_from([0.02, 0.3, 1.0]),
        costs=st.sampled_from([None, h200()]),
    )
    def choose_policy(self, seed: int, change: float, costs: CostTables | None) -> None:
        policy = RandomModes(random.Random(seed), change)
        limits = dataclasses.replace(ROLLING, can_swap=True)
        self.scheduler = Scheduler(limits, policy, costs)
        self.leaves = 0  # step at which rows under way may no longer be parked

    def check_mode(self, plan: Plan) -> None:
        is_rolling = plan.mode is Mode.ROLLING
        assert is_rolling or not (plan.rolling.entering or plan.rolling.leaving)
        assert not (is_rolling and (plan.b0.host_decodes or plan.b1))
        under_way = {row.request for row in self.scheduler.rows_under_way}
        assert not under_way & {row.request for row in plan.rows}
        assert not under_way & {swap.request for swap in plan.swaps}
        if is_rolling or not under_way:
            self.leaves = plan.step + MAX_WAIT_STEPS + 1
        assert plan.step <= self.leaves, "groups were parked for ever"

    def check_oldest(self, plan: Plan) -> None:
        """Whoever is passed over has its turn later: see `Supervision`."""


TestModesMachine = ModesMachine.TestCase
TestModesMachine.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, derandomize=True
)
TestRollingMachine = RollingMachine.TestCase
TestRollingMachine.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, derandomize=True
)


def test_a_row_leaves_as_many_steps_later_as_there_are_layers():
    scheduler = Scheduler(ROLLING, RollingLane())
    scheduler.add(make_request(0, 20, 3, "host"))
    plans = run_to_end(scheduler)
    rolling = [plan for plan in plans if plan.mode is Mode.ROLLING]
    entered = [i for i, plan in enumerate(rolling) if plan.rolling.entering]
    left = [i for i, plan in enumerate(rolling) if plan.rolling.leaving]
    # Of three tokens the prefill samples the first.
    assert len(entered) == 2
    assert left == [i + ROLLING.num_layers for i in entered]
    assert not any(row.samples for plan in rolling for row in plan.rolling.entering)


def test_a_stopped_request_keeps_its_blocks_until_its_group_has_left():
    scheduler = Scheduler(ROLLING, RollingLane())
    scheduler.add(make_request(0, 20, 9, "host"))
    while not any(True for _ in scheduler.rows_under_way):
        run_step(scheduler)
    pool = scheduler.pools[Placement.HOST]
    used = pool.num_used
    scheduler.abort("r0")
    for _ in range(ROLLING.num_layers - 1):
        run_step(scheduler)
        assert pool.num_used == used
    while scheduler.has_requests:
        run_step(scheduler)
    assert pool.num_used == 0
    scheduler.check_integrity()


def test_rows_that_wait_for_the_groups_to_run_empty_do_not_run_twice():
    """A policy that stops rolling leaves rows under way; host rows wait until they have left."""

    class Fickle(OffloadPolicy):
        name = "fickle"
        placements = (Placement.HOST,)
        rolls_now = True

        def rolls(self, now):
            return self.rolls_now

    policy = Fickle()
    scheduler = Scheduler(ROLLING, policy)
    for i in range(4):
        scheduler.add(make_request(i, 20, 12, "host"))
    while not any(True for _ in scheduler.rows_under_way):
        run_step(scheduler)
    policy.rolls_now = False
    modes = [plan.mode for plan in run_to_end(scheduler)]
    first = modes.index(Mode.PIPELINED)
    assert first == ROLLING.num_layers
    assert Mode.ROLLING not in modes[first:]


@given(
    device_ms=st.floats(0.5, 100),
    contexts=st.lists(st.integers(1, 8192), min_size=1, max_size=200),
)
def test_groups_together_are_what_the_host_attends_to_in_a_step(
    device_ms: float, contexts: list[int]
):
    """However uneven the contexts, their sum fills the step; and no group has all of it."""
    predictor = Predictor(h200())
    size = GroupSize(predictor, LARGE)
    size.observe(device_ms / 1e3)
    groups: deque[tuple[int, int]] = deque(maxlen=LARGE.num_layers)
    waiting = deque(contexts)
    for _ in range(3 * LARGE.num_layers):
        staying = [group for group in list(groups)[-(LARGE.num_layers - 1) :] if group[0]]
        count = size.fitting(waiting, staying)
        assert 0 <= count <= min(len(waiting), LARGE.rolling_rows)
        entering = [waiting.popleft() for _ in range(count)]
        groups.append((count, sum(entering)))
        loads = [group for group in groups if group[0]]
        host_s = sum(predictor.host_s(*load) for load in loads)
        assert len(loads) <= 1 or host_s <= device_ms / 1e3 + 1e-9
        if count > 1:  # without its last row it is below an even share
            less_s = predictor.host_s(count - 1, sum(entering[:-1]))
            assert less_s * LARGE.num_layers < device_ms / 1e3
        if waiting and not staying:
            assert count > 0
        waiting.extend(entering)  # their tokens are never the last


@pytest.mark.parametrize("context", [100, 1000, 20_000])
def test_as_many_requests_as_the_host_attends_to_keep_the_groups_busy(context: int):
    predictor = Predictor(h200())
    size = GroupSize(predictor, LARGE)
    size.observe(5e-3)
    capacity = size.capacity(context)
    under_way = capacity * LARGE.num_layers / (LARGE.num_layers + STEPS_TO_ENTER + 1)
    rows = under_way / LARGE.num_layers
    is_full = rows >= LARGE.rolling_rows
    assert is_full or 0.8 * 5e-3 < predictor.rolling_host_s(rows, rows * context) < 1.3 * 5e-3


def look(tables, *, slo_s: float = 0.3, device_blocks: int = 1000) -> Outlook:
    """The outlook of 256 requests of 1000 tokens in and 100 out."""
    limits = dataclasses.replace(LARGE, tpot_slo_s=slo_s)
    outlook = Outlook(Predictor(tables), limits)
    outlook.look([make_request(0, 1000, 100)], 256, device_blocks)
    return outlook


def test_a_fast_device_short_of_memory_rolls_within_the_latency_asked_for(monkeypatch):
    monkeypatch.setattr("neojax.scheduler.outlook.MIN_GAIN", 1.0)
    outlook = look(h200())
    assert outlook.rolling_rows > 0
    assert outlook.gain > 1.05
    assert look(h200(), slo_s=0.05).rolling_rows == 0


def test_on_a_slow_device_a_token_in_as_many_steps_as_layers_takes_too_long():
    assert look(t4(), slo_s=0.2).rolling_rows == 0


def test_auto_chooses_among_three_modes_and_rolls_only_within_the_target():
    """The device holds three requests of 200; a host row gets a token in 34 ROLLING steps."""

    def modes(slo_s: float, device_blocks: int, rolling_rows: int = 16) -> set[Mode]:
        limits = dataclasses.replace(
            LARGE, tpot_slo_s=slo_s, rolling_rows=rolling_rows, num_device_blocks=device_blocks,
            can_swap=True,
        )  # fmt: skip
        scheduler = Scheduler(limits, Auto(), h200())
        for i in range(200):
            scheduler.add(make_request(i, 1000, 100))
        return {plan.mode for plan in (run_step(scheduler) for _ in range(150)) if plan}

    assert Mode.ROLLING in modes(1.0, 250)
    assert Mode.ROLLING not in modes(1.0, 250, rolling_rows=0)
    assert Mode.ROLLING not in modes(0.1, 250)
    assert modes(1.0, 20_000) == {Mode.DEVICE_ONLY}


def test_a_target_that_no_host_row_meets_keeps_requests_off_the_host():
    scheduler = make_scheduler(Auto(), t4(), tpot_slo_s=0.001)
    for i in range(6):
        scheduler.add(make_request(i, 40, 8))
    plans = run_to_end(scheduler)
    assert {plan.mode for plan in plans} == {Mode.DEVICE_ONLY}


def test_the_first_by_priority_enter_then_the_longest_unserved():
    scheduler = Scheduler(dataclasses.replace(ROLLING, rolling_rows=1), RollingLane())
    for i, priority in enumerate((5, 0, 5, -1)):
        scheduler.add(make_request(i, 20, 6, "host", priority=priority))
    entered = []
    while len(entered) < 8:
        plan = run_step(scheduler)
        entered += [row.request.request_id for row in plan.rolling.entering]
    assert entered[:2] == ["r3", "r1"]
    assert set(entered) == {"r0", "r1", "r2", "r3"}, "an interval of the others is theirs"


def test_a_device_with_room_for_all_does_not_roll():
    assert look(h200(), device_blocks=40_000).rolling_rows == 0


def test_the_predicted_step_is_the_longer_of_both_queues():
    predictor = Predictor(h200())
    device = Load(num_decodes=15, decode_context=15_000)
    device_s = predictor.rolling_device_s(device, 16)
    assert predictor.rolling_seconds(device, 16, 1, 100) == device_s
    assert predictor.rolling_seconds(device, 16, 16, 100_000) > 2 * device_s
    prediction = predictor.predict_rolling(device, 16, [(4, 4000)] * 32)
    assert prediction.step_s == pytest.approx(max(device_s, prediction.host_attention_s))


@pytest.mark.parametrize("ratio", [0.8, 1.25])
@pytest.mark.parametrize("context", [10, 100_000])  # the device's part is longer, the host's
def test_what_rolling_steps_take_is_learnt_whichever_part_is_longer(ratio: float, context: int):
    predictor = Predictor(h200())
    device = Load(num_decodes=15, decode_context=15_000)

    def predict() -> Prediction:
        return predictor.predict_rolling(device, 16, [(4, context)] * 32)

    truth = ratio * predict().step_s
    for _ in range(4000):
        predictor.corrections.observe(Mode.ROLLING, predict(), truth, 0.0)
    assert predict().step_s == pytest.approx(truth, rel=0.01)
    assert predictor.corrections.step[Mode.ROLLING] == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("policy", [Auto, RollingLane])
def test_prompts_are_computed_in_even_pieces_where_the_steady_state_rolls(
    policy: type[OffloadPolicy],
):
    """The device holds 15 requests of 1050: two or three hundred tokens a step replace them."""
    limits = dataclasses.replace(LARGE, tpot_slo_s=1.0, can_swap=True)
    scheduler = Scheduler(limits, policy(), h200())
    for i in range(400):
        scheduler.add(make_request(i, 1000, 100))
    plans = [run_step(scheduler) for _ in range(600)][200:]
    assert all(plan.mode is Mode.ROLLING for plan in plans)
    pieces = [sum(row.num_tokens for row in plan.b0.chunks) for plan in plans]
    # But for prompts on their way to the host, where the fetch of what is before would show.
    even = [n for plan, n in zip(plans, pieces, strict=True) if not plan.b0.host_chunks]
    assert max(even) <= 512
    assert sum(piece > 0 for piece in pieces) > len(pieces) / 2


def test_policies_that_roll_need_their_programs():
    with pytest.raises(ValueError, match="start it with --offload-policy rolling"):
        make_scheduler(RollingLane())
    assert Scheduler(LIMITS, Auto()).schedule() is None
