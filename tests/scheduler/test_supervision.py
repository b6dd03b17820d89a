"""Bounded waiting: who has waited too long runs, and nobody runs with them for that."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from neojax.scheduler.auto import Auto
from neojax.scheduler.neo import Neo
from neojax.scheduler.offer import Choice, Offer
from neojax.scheduler.plan import Plan
from neojax.scheduler.request import Placement
from neojax.scheduler.scheduler import Scheduler
from neojax.scheduler.situation import Situation
from neojax.scheduler.supervision import DUE_STEPS, MAX_WAIT_STEPS
from tests.scheduler.tables import make_tables
from tests.scheduler.test_scheduler import LIMITS, make_request, make_scheduler, run_step


class Never(Auto):
    """Runs no host row, and starts nothing there, while the device has anything else to do."""

    name = "never"

    def choose(self, offer: Offer, now: Situation) -> Choice:
        if not offer.device_decodes:
            return super().choose(offer, now)
        return Choice(offer.trimmed(offer.num_tokens, device_only=True))


def host_rows(plan: Plan) -> list[str]:
    return [r.request.request_id for r in (*plan.b0.host_decodes, *plan.b1.host_decodes)]


def staggered(*, can_mix: bool) -> tuple[Scheduler, list[Plan]]:
    """Three on the host that start 20 steps apart, beside one on the device that never ends."""
    scheduler = make_scheduler(Never(), max_model_len=2048, num_device_blocks=128, can_mix=can_mix)
    scheduler.add(make_request(0, 16, 1200, "device"))
    plans: list[Plan] = []
    for index in range(1, 4):
        scheduler.add(make_request(index, 16, 30, "host"))
        for _ in range(20):
            plan = run_step(scheduler)
            assert plan is not None
            plans.append(plan)
    while len(plans) < 7 * MAX_WAIT_STEPS:
        plan = run_step(scheduler)
        assert plan is not None
        plans.append(plan)
    return scheduler, plans


@pytest.mark.parametrize("can_mix", [False, True])
def test_only_those_run_that_have_waited_too_long_and_none_waits_longer(can_mix: bool):
    _, plans = staggered(can_mix=can_mix)
    last: dict[str, int] = {}
    for plan in plans:
        for row in plan.b0.host_chunks:
            last[row.request.request_id] = plan.step
        names = host_rows(plan)
        for name in names:
            assert plan.step - last[name] == MAX_WAIT_STEPS + 1, "served for another's sake"
            last[name] = plan.step
        assert all(plan.step - step <= MAX_WAIT_STEPS for step in last.values())
        assert bool(plan.b1) == bool(names and not can_mix)
    assert sorted(last) == ["r1", "r2", "r3"]


def test_room_for_them_is_made_by_the_prefill():
    scheduler = make_scheduler(
        Never(), max_num_batched_tokens=32, max_model_len=1024, num_device_blocks=256
    )
    scheduler.add(make_request(0, 16, 900, "device"))
    run_step(scheduler)
    scheduler.add(make_request(1, 16, 10, "host"))
    served: list[int] = []
    for index in range(2, 3 * MAX_WAIT_STEPS):
        if index % 16 == 2:
            scheduler.add(make_request(index, 500, 1, "device"))  # prefill fills every step
        plan = run_step(scheduler)
        assert plan is not None
        tokens = sum(row.num_tokens for row in plan.rows)
        assert tokens <= 32
        if host_rows(plan):
            served.append(plan.step)
            assert tokens == 32
    assert len(served) == 1
    assert served[0] > MAX_WAIT_STEPS


def test_neo_serves_first_who_has_waited_for_half_of_that():
    # Served by arrival alone, the first few would run in every step, and the others only once
    # they must: all at once, on a host that is too slow for it.
    tables = make_tables(host_gbs=4)
    limits = dataclasses.replace(
        LIMITS,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        num_device_blocks=2048,
        num_host_blocks=2048,
        scratch_tokens=4096,
    )
    scheduler = Scheduler(limits, Neo(), tables)
    scheduler.add(make_request(99, 16, 1500, "device"))
    for index in range(24):
        scheduler.add(make_request(index, 400, 300, "host"))
    waited: list[int] = []
    last: dict[str, int] = {}
    for step in range(600):
        if step % 2 == 0:
            scheduler.add(make_request(100 + step, 1500, 1, "device"))
        plan = run_step(scheduler)
        assert plan is not None
        assert "had waited" not in plan.reason
        for name in host_rows(plan):
            waited.append(plan.step - last.get(name, plan.step))
            last[name] = plan.step
    assert len(last) == 24
    assert DUE_STEPS < max(waited) <= MAX_WAIT_STEPS
    assert statistics.median(waited) < DUE_STEPS


def test_neo_keeps_room_to_move_a_full_device_to_the_host():
    scheduler = make_scheduler(
        Neo(),
        make_tables(),
        max_num_seqs=24,
        max_num_batched_tokens=256,
        num_device_blocks=32,
        num_host_blocks=64,
        scratch_tokens=512,
        can_swap=True,
    )
    for index in range(40):
        scheduler.add(make_request(index, 20, 60))
    while scheduler.has_requests:
        plan = run_step(scheduler)
        assert plan is not None
        started = [m for m in plan.moves if m.reason == "starts" and m.placement is Placement.HOST]
        assert not started or scheduler.pools[Placement.HOST].num_free >= 32
    assert scheduler.num_placed[Placement.HOST] > 0
