"""Turns on the device: who gets one, who gives one, and what never happens for it."""

from __future__ import annotations

import dataclasses
import statistics

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize

from neojax.scheduler.auto import Auto
from neojax.scheduler.baselines import RollingLane
from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.offer import Choice, Offer
from neojax.scheduler.plan import Plan
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.rotation import COPY_SHARE, HOLD_STEPS, LEAD
from neojax.scheduler.scheduler import Scheduler
from neojax.scheduler.situation import Situation
from neojax.scheduler.swapping import MIN_STEPS_BETWEEN_MOVES
from tests.scheduler.tables import h200
from tests.scheduler.test_scheduler import (
    LIMITS,
    SchedulerMachine,
    make_request,
    run_step,
    run_to_end,
)

TURN = MIN_STEPS_BETWEEN_MOVES
ROLLING = dataclasses.replace(
    LIMITS, num_layers=4, rolling_rows=2, can_swap=True, rotate_steps=TURN, max_model_len=512,
    num_host_blocks=200, num_device_blocks=24, max_num_seqs=8,
)  # fmt: skip


class HostWaits(OffloadPolicy):
    """Host rows run in every fourth step, so that they are behind; nobody moves but by turns."""

    name = "host-waits"
    placements = (Placement.DEVICE, Placement.HOST)

    def __init__(self) -> None:
        self.steps = 0

    def choose(self, offer: Offer, now: Situation) -> Choice:
        self.steps += 1
        if self.steps % 4 and offer.device_decodes:
            return Choice(offer.trimmed(offer.num_tokens, device_only=True))
        return self.everything(offer)


def turns(plans: list[Plan]) -> list[tuple[str, Placement]]:
    return [
        (move.request.request_id, move.placement)
        for plan in plans
        for move in plan.moves
        if "turn" in move.reason
    ]


def serve(limits: SchedulerLimits, requests: list[Request], policy=None, costs=None) -> list[Plan]:
    scheduler = Scheduler(limits, policy or HostWaits(), costs)
    for request in requests:
        scheduler.add(request)
    plans = run_to_end(scheduler, max_steps=20_000)
    scheduler.check_integrity()
    assert all(pool.num_used == 0 for pool in scheduler.pools.values())
    return plans


def steps_per_token(plans: list[Plan]) -> dict[str, float]:
    """Of each request, between its first token and its last."""
    steps: dict[str, list[int]] = {}
    for plan in plans:
        for row in plan.sampled_rows:
            steps.setdefault(row.request.request_id, []).append(plan.step)
    return {name: (at[-1] - at[0]) / (len(at) - 1) for name, at in steps.items()}


def long_requests(count: int = 6, tokens: int = 160, **options) -> list[Request]:
    return [make_request(i, 40, tokens, **options) for i in range(count)]


@pytest.mark.parametrize("policy", [HostWaits, RollingLane])
def test_turns_make_time_per_token_alike(policy):
    spread = {}
    for steps in (0, TURN):
        plans = serve(dataclasses.replace(ROLLING, rotate_steps=steps), long_requests(), policy())
        paces = steps_per_token(plans).values()
        spread[steps] = max(paces) / min(paces)
    assert spread[TURN] - 1 < 0.6 * (spread[0] - 1)


def test_without_the_flag_nobody_moves_for_fairness():
    plans = serve(dataclasses.replace(ROLLING, rotate_steps=0), long_requests())
    assert turns(plans) == []


def test_everybody_has_turns_on_both_sides():
    plans = serve(ROLLING, long_requests())
    sides = {name: set() for name in (f"r{i}" for i in range(6))}
    for plan in plans:
        for row in plan.sampled_rows:
            sides[row.request.request_id].add(row.placement)
    assert all(of == set(Placement) for of in sides.values())


def test_where_host_rows_run_in_every_step_nobody_takes_turns():
    class AllRun(HostWaits):
        def choose(self, offer: Offer, now: Situation) -> Choice:
            return self.everything(offer)

    assert turns(serve(ROLLING, long_requests(), AllRun())) == []


def test_the_one_furthest_behind_comes_in_for_the_one_furthest_ahead():
    scheduler = Scheduler(ROLLING, HostWaits())
    requests = long_requests()
    for request in requests:
        scheduler.add(request)
    while True:
        before = {r: (r.num_tokens - 40, r.decoding_since) for r in requests}
        plan = run_step(scheduler)
        if turns([plan]):
            break

    def pace(request: Request) -> float:
        tokens, since = before[request]
        return (plan.step - since + 1) / tokens

    (swap,) = plan.swaps
    on_device = [r for r in requests if r.placement is Placement.DEVICE]
    assert all(pace(swap.request) <= pace(r) for r in on_device)
    next_swaps = next(p.swaps for p in iter(lambda: run_step(scheduler), None) if turns([p]))
    assert pace(next_swaps[0].request) >= LEAD * pace(swap.request)
    assert not next_swaps[0].is_out


def test_one_who_is_awaited_does_not_run_and_does_not_wait_long():
    scheduler = Scheduler(ROLLING, HostWaits())
    for request in long_requests():
        scheduler.add(request)
    awaited: dict[Request, int] = {}
    while scheduler.has_requests:
        held = set(scheduler._swapping.held)
        plan = run_step(scheduler)
        for request in held:
            assert request not in {row.request for row in plan.rows}
            awaited.setdefault(request, plan.step)
            assert plan.step - awaited[request] <= HOLD_STEPS
        awaited = {r: at for r, at in awaited.items() if r in set(scheduler._swapping.held)}


def test_pinned_requests_stay_where_they_are():
    requests = [
        *(make_request(i, 40, 120, "device") for i in range(2)),
        *(make_request(i, 40, 120, "host") for i in range(2, 4)),
        *(make_request(i, 40, 120) for i in range(4, 7)),
    ]
    moved = {name for name, _ in turns(serve(ROLLING, requests))}
    assert moved
    assert moved <= {"r4", "r5", "r6"}


def test_an_urgent_request_never_gives_its_place_to_one_that_is_less_so():
    urgent = make_request(0, 40, 160, priority=-1)
    plans = serve(ROLLING, [urgent, *(make_request(i, 40, 160) for i in range(1, 7))])
    assert ("r0", Placement.HOST) not in turns(plans)


def test_an_urgent_one_that_came_late_takes_a_place_of_those_that_are_less_so():
    scheduler = Scheduler(ROLLING, HostWaits())
    for request in long_requests():
        scheduler.add(request)
    for _ in range(12):
        run_step(scheduler)
    scheduler.add(make_request(6, 100, 120, priority=-1))
    plans = run_to_end(scheduler)
    in_turns = [name for name, placement in turns(plans) if placement is Placement.DEVICE]
    assert in_turns.count("r6") == 1
    assert ("r6", Placement.HOST) not in turns(plans)


def test_one_who_is_about_to_end_keeps_its_place():
    """Three of them, and a slow host: the device's have too little left to be worth a move."""
    limits = dataclasses.replace(ROLLING, num_device_blocks=8)
    assert turns(serve(limits, [make_request(i, 40, TURN + 15) for i in range(3)])) == []
    assert turns(serve(limits, [make_request(i, 40, 4 * TURN) for i in range(3)])) != []


def test_a_long_request_gets_the_places_of_several_short_ones():
    limits = dataclasses.replace(ROLLING, num_device_blocks=16)
    requests = [make_request(i, 30, 120) for i in range(4)]
    requests.append(make_request(4, 130, 100))
    plans = serve(limits, requests)
    ((out, _), *_) = [
        (plan.swaps, plan.step) for plan in plans if any(s.is_out for s in plan.swaps)
    ]
    assert len(out) > 1
    assert ("r4", Placement.DEVICE) in turns(plans)


@pytest.mark.parametrize("costs", [None, h200()])
def test_copies_take_no_more_than_their_share_of_the_steps(costs):
    """Predicted: at 50 GB/s these copies are short; at a hundredth they would be most of a step."""
    if costs is None:
        assert turns(serve(ROLLING, long_requests()))
        return
    slow = dataclasses.replace(
        costs,
        swap_out=dataclasses.replace(costs.swap_out, ys=tuple(y * 200 for y in costs.swap_out.ys)),
        swap_in=dataclasses.replace(costs.swap_in, ys=tuple(y * 200 for y in costs.swap_in.ys)),
    )
    count = {}
    for name, tables in (("fast", costs), ("slow", slow)):
        plans = serve(ROLLING, long_requests(), HostWaits(), tables)
        count[name] = len(turns(plans))
        copies = [tables.num_layers * _copy_s(tables, plan) for plan in plans]
        longest = 2 * max(copies)  # both moves of the turn under way when the last step ends
        assert sum(copies) <= COPY_SHARE * sum(p.prediction.step_s for p in plans) + longest
    assert 0 < count["slow"] < count["fast"]


def _copy_s(tables, plan: Plan) -> float:
    return sum(
        (tables.swap_out if swap.is_out else tables.swap_in)(swap.num_tokens) for swap in plan.swaps
    )


def test_a_failure_or_an_abort_while_room_is_made_leaves_nobody_waiting():
    for happens in ("abort", "rollback"):
        scheduler = Scheduler(ROLLING, HostWaits())
        for request in long_requests():
            scheduler.add(request)
        plan = scheduler.schedule()
        while not scheduler._swapping.held:
            scheduler.update(plan, [1] * len(plan.sampled_rows))
            plan = scheduler.schedule()
        (held,) = scheduler._swapping.held
        if happens == "abort":
            scheduler.update(plan, [1] * len(plan.sampled_rows))
            scheduler.abort(held.request_id)
        else:
            scheduler.rollback()
        run_to_end(scheduler)
        assert not list(scheduler._swapping.held)


def test_the_spread_of_many_requests_is_small():
    """A saturated engine of unequal requests: the slowest per token against the median one."""
    requests = [make_request(i, 20 + 7 * i % 60, 120 + 11 * i % 80) for i in range(24)]
    spread = {}
    for steps in (0, TURN):
        limits = dataclasses.replace(ROLLING, rotate_steps=steps, num_device_blocks=40)
        paces = list(steps_per_token(serve(limits, requests, RollingLane())).values())
        spread[steps] = max(paces) / statistics.median(paces)
        requests = [make_request(r.arrival, len(r.prompt_ids), r.max_tokens) for r in requests]
    assert spread[TURN] - 1 < 0.5 * (spread[0] - 1)


class RotatingMachine(SchedulerMachine):
    """Every promise of the scheduler, with turns as short as may be, and groups under way."""

    max_steps = 20_000

    @initialize(
        policy=st.sampled_from([Auto, RollingLane, HostWaits]),
        device_blocks=st.sampled_from([2, 4, 8]),
        host_blocks=st.sampled_from([24, 48]),
        turn=st.sampled_from([TURN, 3 * TURN]),
    )
    def choose(self, policy, device_blocks: int, host_blocks: int, turn: int) -> None:
        limits = dataclasses.replace(
            LIMITS, num_device_blocks=device_blocks, num_host_blocks=host_blocks, can_swap=True,
            rotate_steps=turn, num_layers=3, rolling_rows=2,
        )  # fmt: skip
        self.scheduler = Scheduler(limits, policy())
        self.turn = turn
        self.moved: dict[Request, int] = {}
        self.waits: dict[Request, int] = {}

    def room(self, placement: str) -> int:
        device, host = (self.scheduler.pools[p].limit for p in Placement)
        return {"device": device, "host": host, "auto": max(device, host)}[placement]

    def check_mode(self, plan: Plan) -> None:
        under_way = {row.request for row in self.scheduler.rows_under_way}
        assert not under_way & {swap.request for swap in plan.swaps}

    def check_oldest(self, plan: Plan) -> None:
        """Host rows wait their turn; here instead: no ping-pong, and nobody is held for long."""
        reasons = {move.request: move.reason for move in plan.moves}
        for swap in plan.swaps:
            least = self.turn if "turn" in reasons[swap.request] else MIN_STEPS_BETWEEN_MOVES
            last = self.moved.get(swap.request)
            assert last is None or plan.step - last >= least, "ping-pong"
            self.moved[swap.request] = plan.step
            assert swap.request.params.kv_placement in ("auto", swap.placement_to.value)
        held = set(self.scheduler._swapping.held)
        assert not held & {row.request for row in plan.rows}
        self.waits = {r: self.waits.get(r, plan.step) for r in held}
        assert all(plan.step - since <= HOLD_STEPS for since in self.waits.values())


TestRotatingMachine = RotatingMachine.TestCase
TestRotatingMachine.settings = settings(
    max_examples=25, stateful_step_count=60, deadline=None, derandomize=True
)
