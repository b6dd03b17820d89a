"""The scheduler as a state machine: whatever is asked of it, its promises hold."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from neojax.sampling_params import SamplingParams
from neojax.scheduler.auto import Auto
from neojax.scheduler.baselines import DeviceOnly, Full
from neojax.scheduler.costs import CostTables
from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.plan import Mode, Plan
from neojax.scheduler.policy import OffloadPolicy, load_policy
from neojax.scheduler.request import Placement, Request, RequestState
from neojax.scheduler.scheduler import Scheduler

LIMITS = SchedulerLimits(
    max_num_seqs=6,
    max_num_batched_tokens=64,
    max_model_len=256,
    block_size=16,
    num_device_blocks=8,
    num_host_blocks=24,
    max_num_chunks=3,
    scratch_tokens=256,
)
EOS = 7


class AnyToken:
    """A constraint that allows everything: what counts is that its request waits for tokens."""

    mask = np.full(1, -1, np.int32)


def make_request(
    index: int,
    num_prompt: int,
    max_tokens: int,
    placement: str = "auto",
    *,
    priority: int = 0,
    is_constrained: bool = False,
) -> Request:
    return Request(
        request_id=f"r{index}",
        prompt_ids=list(range(100, 100 + num_prompt)),
        params=SamplingParams(max_tokens=max_tokens, kv_placement=placement, priority=priority),
        constraint=AnyToken() if is_constrained else None,
        max_tokens=max_tokens,
        stop_ids=frozenset({EOS}),
        seed=0,
        arrival=index,
    )


def make_scheduler(
    policy: OffloadPolicy | None = None, costs: CostTables | None = None, **limits: float
) -> Scheduler:
    merged = {f: getattr(LIMITS, f) for f in SchedulerLimits.__slots__} | limits
    return Scheduler(SchedulerLimits(**merged), policy or Auto(), costs)


def run_step(scheduler: Scheduler, token: int = 1) -> Plan | None:
    plan = scheduler.schedule()
    if plan is not None:
        scheduler.update(plan, [token] * len(plan.sampled_rows))
    return plan


def run_to_end(scheduler: Scheduler, max_steps: int = 2000) -> list[Plan]:
    plans = []
    while scheduler.has_requests:
        plan = run_step(scheduler)
        assert plan is not None, "work exists but nothing can run"
        plans.append(plan)
        assert len(plans) < max_steps
    return plans


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, steps and late completions, with up to two steps in flight."""

    max_steps = 2000  # that all requests of a run may take to finish

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler()
        self.in_flight: deque[Plan] = deque()
        self.requests: list[Request] = []
        self.resident: dict[Request, int] = {}  # tokens that completed steps computed

    @rule(
        num_prompt=st.integers(1, 200),
        max_tokens=st.integers(1, 60),
        placement=st.sampled_from(["auto", "device", "host"]),
        priority=st.sampled_from([0, 0, 0, -1, 3]),
        is_constrained=st.sampled_from([False, False, True]),
    )
    def add(
        self, num_prompt: int, max_tokens: int, placement: str, priority: int, is_constrained: bool
    ) -> None:
        request = make_request(
            len(self.requests),
            num_prompt,
            min(max_tokens, LIMITS.max_model_len - num_prompt),
            placement,
            priority=priority,
            is_constrained=is_constrained,
        )
        self.add_request(request)

    def add_request(self, request: Request) -> None:
        """It is taken, or refused at once where no pool could hold all its tokens."""
        num_tokens = len(request.prompt_ids) + request.max_tokens - 1
        if -(-num_tokens // LIMITS.block_size) > self.room(request.params.kv_placement):
            with pytest.raises(ValueError, match=r"pool holds|is not possible"):
                self.scheduler.add(request)
        else:
            self.scheduler.add(request)
            self.requests.append(request)

    def room(self, placement: str) -> int:
        """Blocks of the largest pool that such a request may use."""
        return {"device": 8, "host": 24, "auto": 24}[placement]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        was_finished = request.state is RequestState.FINISHED
        assert (self.scheduler.abort(request.request_id) is None) == was_finished

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def schedule(self) -> None:
        plan = self.scheduler.schedule()
        if plan is None:
            if not self.in_flight and self.scheduler.has_requests:
                raise AssertionError("idle though work exists")
            return
        self.check_plan(plan)
        self.in_flight.append(plan)

    @precondition(lambda self: self.in_flight)
    @rule(tokens=st.lists(st.sampled_from([1, 2, 3, 3, 3, EOS, -1]), min_size=12, max_size=12))
    def complete(self, tokens: list[int]) -> None:
        plan = self.in_flight.popleft()
        self.settle(plan, tokens[: len(plan.sampled_rows)])

    def settle(self, plan: Plan, tokens: list[int]) -> None:
        for row in plan.rows:
            # A row continues what completed steps have computed, or an earlier life's is void.
            if row.epoch == row.request.num_preemptions:
                assert row.start.token <= self.resident.get(row.request, 0)
                self.resident[row.request] = row.stop
        self.scheduler.update(plan, tokens)

    @precondition(lambda self: self.in_flight)
    @rule()
    def lose_the_device(self) -> None:
        self.in_flight.clear()
        self.scheduler.rollback()
        assert all(r.placement is Placement.HOST for r in self.scheduler.running)
        for request in self.scheduler.running:
            assert request.progress.token <= self.resident.get(request, 0)

    def check_plan(self, plan: Plan) -> None:
        self.check_rows(plan)
        # Without costs all runs that can.
        self.check_oldest(plan)

    def check_oldest(self, plan: Plan) -> None:
        """It is in every step that it could be in: whatever else happens, somebody gets on."""
        oldest = self.scheduler.running[0] if self.scheduler.running else None
        if oldest is not None and oldest.is_decoding and oldest.wants_more:
            gets_on = {row.request for row in plan.rows} | {swap.request for swap in plan.swaps}
            waits_for_blocks = self.scheduler.pools[oldest.placement].num_retired
            assert waits_for_blocks or oldest in gets_on, "the oldest was passed over"

    def check_rows(self, plan: Plan) -> None:
        rows, limits = list(plan.rows), self.scheduler.limits
        for row in rows:
            if row.start.token == 0:
                self.resident[row.request] = 0  # begun anew, whatever was computed before
        assert len({row.request for row in rows}) == len(rows)
        assert len({row.slot for row in rows}) == len(rows)
        in_batches = plan.num_tokens - len(plan.rolling.leaving)  # a group has places of its own
        assert in_batches <= limits.max_num_batched_tokens
        assert len(plan.b0.chunks) <= limits.max_num_chunks
        assert not plan.b1.chunks
        assert not plan.b1.decodes
        self.check_mode(plan)
        assert sum(-(-r.stop // 16) * 16 for r in plan.b0.host_chunks) <= limits.scratch_tokens
        for row in rows:
            assert len(row.blocks) == -(-row.stop // LIMITS.block_size)
            assert row.request.placement is row.placement
            if row.placement is Placement.HOST and row in plan.b0.chunks and not row.samples:
                assert row.stop % LIMITS.block_size == 0
        for row in (*plan.b0.decodes, *plan.b0.host_decodes, *plan.b1.host_decodes):
            assert row.num_tokens == 1
        for row in plan.sampled_rows:
            if row.request.constraint is not None:
                assert row.request.num_pending == 1, "its last token is not known yet"

    def check_mode(self, plan: Plan) -> None:
        on_host = any(row.placement is Placement.HOST for row in plan.rows)
        assert (plan.mode is Mode.PIPELINED) == on_host

    @invariant()
    def no_block_is_lost(self) -> None:
        self.scheduler.check_integrity()

    @invariant()
    def limits_hold(self) -> None:
        for request in self.requests:
            assert len(request.output_ids) <= request.max_tokens
            assert request.num_pending >= 0
            if request.state is RequestState.FINISHED and request.finish_reason == "length":
                assert len(request.output_ids) == request.max_tokens

    def teardown(self) -> None:
        for _ in range(self.max_steps):  # as the engine's loop: two steps in flight
            if not (self.scheduler.has_requests or self.in_flight):
                break
            plan = self.scheduler.schedule() if len(self.in_flight) < 2 else None
            if plan is not None:
                self.check_plan(plan)
                self.in_flight.append(plan)
            if plan is None or len(self.in_flight) == 2:
                assert self.in_flight, "work exists but nothing can run"
                done = self.in_flight.popleft()
                self.settle(done, [1] * len(done.sampled_rows))
        assert not self.scheduler.has_requests, "somebody never finishes"
        for pool in self.scheduler.pools.values():
            assert pool.num_used == 0
        assert all(r.state is RequestState.FINISHED for r in self.requests)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, derandomize=True
)


def test_requests_go_to_the_host_only_when_the_device_is_full():
    scheduler = make_scheduler()
    for i in range(6):
        scheduler.add(make_request(i, 40, 8))
    run_step(scheduler)
    run_step(scheduler)
    run_step(scheduler)
    run_step(scheduler)
    placed = [r.placement for r in scheduler.running]
    assert placed[:2] == [Placement.DEVICE, Placement.DEVICE]
    assert set(placed[2:]) == {Placement.HOST}
    run_to_end(scheduler)
    assert scheduler.num_preemptions == 0


def test_device_only_never_uses_the_host():
    scheduler = make_scheduler(DeviceOnly())
    for i in range(6):
        scheduler.add(make_request(i, 40, 8))
    plans = run_to_end(scheduler)
    assert {plan.mode for plan in plans} == {Mode.DEVICE_ONLY}


def test_full_places_everything_on_the_host_and_splits_it_in_halves():
    scheduler = make_scheduler(Full())
    for i in range(5):
        scheduler.add(make_request(i, 20, 8))
    plans = run_to_end(scheduler)
    assert {row.placement for plan in plans for row in plan.rows} == {Placement.HOST}
    pure = [plan for plan in plans if not plan.b0.chunks]
    assert all(len(p.b0.host_decodes) - len(p.b1.host_decodes) in (0, 1) for p in pure)


def test_a_preempted_request_is_recomputed_with_its_outputs():
    scheduler = make_scheduler(DeviceOnly())
    scheduler.add(make_request(0, 60, 64))
    scheduler.add(make_request(1, 40, 64))
    plans = run_to_end(scheduler)
    assert scheduler.num_preemptions >= 1
    resumed = [r for p in plans for r in p.b0.chunks if r.request.request_id == "r1"]
    assert sum(r.num_tokens for r in resumed) > 40


def test_thrash_is_bounded_when_the_pool_holds_little_more_than_one_request():
    # Pool for 1.2 requests, four of them: cases D-KV-05.
    scheduler = make_scheduler(DeviceOnly(), num_device_blocks=120, max_model_len=2048)
    requests = [make_request(i, 800, 800) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    run_to_end(scheduler, max_steps=10_000)
    assert [len(r.output_ids) for r in requests] == [800] * 4
    assert max(r.num_preemptions for r in requests) <= 3


def test_a_request_too_large_for_every_pool_is_refused_with_numbers():
    scheduler = make_scheduler(max_model_len=4096)
    with pytest.raises(ValueError, match=r"needs KV for 999 tokens.*device pool holds 128.*384"):
        scheduler.add(make_request(0, 900, 100))


def test_placement_that_the_policy_forbids_is_refused():
    with pytest.raises(ValueError, match=r"kv_placement 'host'.*device-only"):
        make_scheduler(DeviceOnly()).add(make_request(0, 10, 10, placement="host"))


def test_a_prompt_larger_than_the_device_pool_runs_on_the_host_in_chunks():
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 180, 4))
    plans = run_to_end(scheduler)
    chunks = [row for plan in plans for row in plan.b0.chunks]
    assert [row.num_tokens for row in chunks] == [64, 64, 52]
    assert {row.placement for row in chunks} == {Placement.HOST}


def test_blocks_of_a_stopped_request_return_only_after_the_step_in_flight():
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 20, 30))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None
    assert second is not None
    scheduler.update(first, [EOS])
    assert scheduler.pools[Placement.DEVICE].num_used == 2
    scheduler.update(second, [1])
    assert scheduler.pools[Placement.DEVICE].num_used == 0


@pytest.mark.parametrize("halves", [(True, False), (False, True), (False, False)])
def test_a_policy_that_splits_as_no_program_can_run_gets_the_usual_split(halves, caplog):
    class Odd(Auto):
        name = "odd"

        def split(self, host_decodes, has_device_work):
            return tuple(host_decodes if half else () for half in halves)

    scheduler = make_scheduler(Odd(), can_mix=False)
    requests = [make_request(i, 20, 8, placement=p) for i, p in enumerate(["host", "device"])]
    scheduler.add(requests[0])
    run_step(scheduler)
    run_step(scheduler)
    scheduler.add(requests[1])
    run_to_end(scheduler)
    assert [len(r.output_ids) for r in requests] == [8, 8]
    assert "the usual choice is taken" in caplog.text


def test_a_policy_of_ones_own_is_loaded_by_module_and_class():
    assert load_policy("neojax.scheduler.baselines:Full").placements == (Placement.HOST,)
    for bad in ("fastest", "no.such:Policy", "neojax.config:EngineConfig"):
        with pytest.raises(ValueError, match="offload_policy"):
            load_policy(bad)


def test_rollback_does_not_trust_a_resumed_prefill_that_was_in_flight():
    scheduler = make_scheduler(Full(), num_host_blocks=7)
    first, second = make_request(0, 40, 40), make_request(1, 40, 40)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(30):
        run_step(scheduler)
    assert second.num_preemptions == 1
    assert second.output_ids
    while second.state is not RequestState.RUNNING:
        plan = scheduler.schedule()
        assert plan is not None
        if second.state is not RequestState.RUNNING:
            scheduler.update(plan, [1] * len(plan.sampled_rows))
    assert second.progress.token > 0  # its recomputation is in flight, not completed
    scheduler.rollback()
    assert second.progress.token == 0
    run_to_end(scheduler)


def test_chunks_of_host_prefills_fit_the_scratch_in_whole_blocks():
    scheduler = make_scheduler(
        Full(), max_num_batched_tokens=512, max_num_chunks=8, max_num_seqs=8, num_host_blocks=64
    )
    for i in range(7):
        scheduler.add(make_request(i, 33, 4))
    plan = scheduler.schedule()
    assert plan is not None
    assert len(plan.b0.host_chunks) == LIMITS.scratch_tokens // 48


def test_a_lower_priority_number_runs_first_and_arrival_decides_among_equals():
    scheduler = make_scheduler(max_num_seqs=1)
    for i, priority in enumerate((0, 5, -1, 0, -1)):
        scheduler.add(make_request(i, 20, 1, priority=priority))
    plans = run_to_end(scheduler)
    assert [row.request.arrival for plan in plans for row in plan.rows] == [2, 4, 0, 3, 1]


def test_a_constrained_request_waits_for_its_token_and_others_do_not():
    scheduler = make_scheduler()
    plain, constrained = make_request(0, 20, 9), make_request(1, 20, 9, is_constrained=True)
    scheduler.add(plain)
    scheduler.add(constrained)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert [row.request for row in first.sampled_rows] == [plain, constrained]
    assert [row.request for row in second.sampled_rows] == [plain]
    scheduler.update(first, [1, 1])
    third = scheduler.schedule()
    assert third is not None
    assert [row.request for row in third.sampled_rows] == [plain, constrained]


def test_logits_that_are_not_finite_end_the_request_alone():
    scheduler = make_scheduler()
    bad, good = make_request(0, 20, 9), make_request(1, 20, 9)
    scheduler.add(bad)
    scheduler.add(good)
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.update(plan, [-1, 1]) == [good]
    assert bad.finish_reason == "error"
    assert not bad.output_ids
    run_to_end(scheduler)
    assert len(good.output_ids) == 9
