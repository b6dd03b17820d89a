"""What the scheduler promises of any engine: pools down to one block, any policy, wrong costs.

The machine of `test_scheduler` drives it; here it draws the engine too, and keeps books of its own
on who may use which block, who came first and who has waited.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, precondition, rule

from neojax.scheduler import supervision
from neojax.scheduler.admission import possible_placements
from neojax.scheduler.auto import Auto
from neojax.scheduler.costs import CostTables
from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.offer import Choice, Offer
from neojax.scheduler.plan import Mode, Plan, Row
from neojax.scheduler.policy import load_policy
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.rotation import HOLD_STEPS
from neojax.scheduler.scheduler import Scheduler
from neojax.scheduler.situation import Situation
from neojax.scheduler.swapping import MIN_STEPS_BETWEEN_MOVES
from tests.scheduler.tables import h200, t4
from tests.scheduler.test_scheduler import LIMITS, SchedulerMachine, make_request

POLICIES = (
    *("auto", "auto", "neo", "neo", "device-only", "full", "rolling"),
    *(f"{__name__}:{name}" for name in ("Stingy", "Careless")),
)
WAIT_STEPS = 8
"""Here instead of MAX_WAIT_STEPS, so that a short run comes to it."""
STEPS_WITHOUT_ROOM = 8
"""Steps that a row may lack a block beyond the steps for which a policy may pass it over."""

h200, t4 = functools.cache(h200), functools.cache(t4)


class Stingy(Auto):
    """Runs no host row while the device has anything else to do."""

    name = "stingy"

    def choose(self, offer: Offer, now: Situation) -> Choice:
        if not (offer.device_decodes or offer.chunks):
            return super().choose(offer, now)
        return Choice(offer.trimmed(offer.num_tokens, device_only=True))


class Careless(Auto):
    """Asks for what no program can run, for more than fits, for others first, or for nothing."""

    name = "careless"

    def __init__(self) -> None:
        self._random = random.Random(0)

    def choose(self, offer: Offer, now: Situation) -> Choice:
        host = offer.host_decodes
        return self._random.choice(
            [
                self.everything(offer),
                Choice(offer.chunks, host, ()),
                Choice(offer.chunks, (), host),
                Choice(offer.chunks[::-1], host[1:], host[:1]),
                Choice(offer.chunks[1:], host, host),
                Choice(),
            ]
        )


@st.composite
def engines(draw: st.DrawFn) -> SchedulerLimits:
    """Sizes that `EngineConfig` allows, the smallest included."""
    max_num_seqs = draw(st.integers(1, 6))
    smallest = max_num_seqs + LIMITS.block_size
    return dataclasses.replace(
        LIMITS,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.sampled_from([smallest, 64, 256])),
        max_num_chunks=draw(st.sampled_from([1, 3])),
        num_device_blocks=draw(st.sampled_from([1, 2, 3, 8, 13])),
        num_layers=3,
        rolling_rows=draw(st.sampled_from([0, 0, 2])),
        num_host_blocks=draw(st.sampled_from([0, 1, 2, 5, 24])),
        can_mix=draw(st.booleans()),
        can_swap=draw(st.booleans()),
        rotate_steps=draw(st.sampled_from([0, 0, MIN_STEPS_BETWEEN_MOVES])),
        swap_in_threshold=draw(st.sampled_from([0.5, 0.95, 1.0])),
        swap_out_threshold=draw(st.sampled_from([0.5, 1.0])),
    )


class Use(NamedTuple):
    """A step reads or writes a block."""

    placement: Placement
    block: int
    life: tuple[Request, int]  # a request, and how often it had been preempted


def uses_of_row(row: Row) -> Iterator[Use]:
    for block in row.blocks:
        yield Use(row.placement, block, (row.request, row.epoch))


def uses(plan: Plan) -> Iterator[Use]:
    for row in (*plan.rows, *plan.rolling.entering):
        yield from uses_of_row(row)
    for swap in plan.swaps:
        life = swap.request, swap.request.num_preemptions
        source = Placement.DEVICE if swap.is_out else Placement.HOST
        yield from (Use(source, block, life) for block in swap.source_blocks)
        yield from (Use(swap.placement_to, block, life) for block in swap.target_blocks)


class PromisesMachine(SchedulerMachine):
    """Any engine under any policy, with costs that are wrong by a factor of three."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: dict[Request, int] = {}
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(supervision, "MAX_WAIT_STEPS", WAIT_STEPS)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.patch.undo()

    @initialize(
        policy=st.sampled_from(POLICIES),
        machine=st.sampled_from([None, h200, t4]),
        limits=engines(),
    )
    def start(
        self, policy: str, machine: Callable[[], CostTables] | None, limits: SchedulerLimits
    ) -> None:
        self.policy = load_policy(policy)
        if policy == "neo":
            machine = machine or t4
        if policy == "rolling":
            limits = dataclasses.replace(limits, rolling_rows=2)
        if limits.rolling_rows:
            self.max_steps = 20_000
        self.scheduler = Scheduler(limits, self.policy, machine and machine())

    def room(self, placement: str) -> int:
        pools = self.scheduler.pools
        return max(
            (pools[p].limit for p in self.policy.placements if placement in ("auto", p.value)),
            default=0,
        )

    @rule(num_prompt=st.integers(1, 16), max_tokens=st.integers(1, 20))
    def add_a_short_one(self, num_prompt: int, max_tokens: int) -> None:
        """Of those that fit in the smallest pools."""
        self.add_request(make_request(len(self.requests), num_prompt, max_tokens))

    @rule(num_prompt=st.sampled_from([0, 256, 300]))
    def add_an_impossible_one(self, num_prompt: int) -> None:
        request = make_request(len(self.requests), num_prompt, 1)
        with pytest.raises(ValueError, match=r"has no tokens|max_model_len"):
            self.scheduler.add(request)

    @precondition(lambda self: self.in_flight)
    @rule(error=st.sampled_from([1 / 3, 1.0, 3.0]), host_error=st.sampled_from([1 / 3, 1.0, 3.0]))
    def measure(self, error: float, host_error: float) -> None:
        plan = self.in_flight[0]
        if plan.prediction is not None:
            p = plan.prediction
            self.scheduler.observe(plan, error * p.step_s, host_error * p.host_attention_s)

    def check_plan(self, plan: Plan) -> None:
        self.check_rows(plan)
        self.check_blocks(plan)
        self.check_order(plan)
        self.check_moves(plan)
        self.check_waiting(plan)
        self.check_oldest(plan)

    def check_mode(self, plan: Plan) -> None:
        if plan.mode is Mode.ROLLING:
            assert self.scheduler.limits.rolling_rows
        elif plan.mode is Mode.DEVICE_ONLY:
            assert all(row.placement is Placement.DEVICE for row in plan.rows)
        else:
            assert any(row.placement is Placement.HOST for row in plan.rows)
        has_device_work = bool(plan.b0.chunks or plan.b0.decodes)
        if not self.scheduler.limits.can_mix:
            assert not (has_device_work and plan.b0.host_decodes)
        assert plan.b0 or not plan.b1

    def check_blocks(self, plan: Plan) -> None:
        """Nobody is given a block while a step in flight may still touch it for another."""
        theirs = {
            (use.placement, use.block): use.life
            for use in (
                *(use for earlier in self.in_flight for use in uses(earlier)),
                *(use for row in self.scheduler.rows_under_way for use in uses_of_row(row)),
            )
        }
        for use in uses(plan):
            owner = theirs.get((use.placement, use.block), use.life)
            assert owner == use.life, "a block has two owners"

    def check_order(self, plan: Plan) -> None:
        """Of requests that may live in the same pools, none starts before one that came first."""
        started = [m.request for m in plan.moves if m.placement and m.reason == "starts"]
        for request in started:
            for other in self.scheduler.waiting:
                if other.order < request.order and self.pools_of(other) == self.pools_of(request):
                    preempted = [m.request for m in plan.moves if m.placement is None]
                    assert other in preempted, "a later request started first"

    def pools_of(self, request: Request) -> tuple[Placement, ...]:
        return possible_placements(request, self.policy, self.scheduler._memory)

    def check_moves(self, plan: Plan) -> None:
        assert self.scheduler.limits.can_swap or not plan.swaps
        moving = {swap.request for swap in plan.swaps}
        rows = (*plan.rows, *plan.rolling.entering)
        assert not moving & {row.request for row in rows}
        started = {m.request for m in plan.moves if m.reason == "starts"}
        others = [r for r in self.scheduler.running if r not in moving | started]
        device_was_idle = all(r.placement is Placement.HOST for r in others)
        for swap in plan.swaps:
            last = self.moved.get(swap.request)
            # Who only waits on the host comes back at once when the device has nobody.
            if not device_was_idle or self.policy.name in ("neo", "full", "rolling"):
                assert last is None or plan.step - last >= MIN_STEPS_BETWEEN_MOVES, "ping-pong"
            self.moved[swap.request] = plan.step
            assert swap.placement_to is swap.request.placement
            assert swap.request.params.kv_placement in ("auto", swap.placement_to.value)
            assert len(swap.source_blocks) == len(swap.target_blocks) == -(-swap.num_tokens // 16)
            launched = [r.stop for p in self.in_flight for r in p.rows if r.request is swap.request]
            assert swap.num_tokens <= max(self.resident[swap.request], *launched, 0)

    def check_waiting(self, plan: Plan) -> None:
        """Host rows are passed over for a bounded number of steps."""
        if self.policy.name == "device-only" or self.scheduler.limits.rolling_rows:
            return  # they do not run there, or a few at a time
        for request in self.scheduler.running:
            if request.placement is Placement.HOST:
                waited = plan.step - request.served_step
                most = WAIT_STEPS + STEPS_WITHOUT_ROOM + HOLD_STEPS  # before it moves in its turn
                assert waited <= most, "a host row starves"

    def check_oldest(self, plan: Plan) -> None:
        """A host row may be passed over, a device row may not."""
        running = self.scheduler.running
        if running and running[0].placement is Placement.DEVICE:
            super().check_oldest(plan)


TestPromisesMachine = PromisesMachine.TestCase
TestPromisesMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True
)
