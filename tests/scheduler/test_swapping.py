"""Requests that move between the pools: when, which, and how often."""

from __future__ import annotations

import pytest

from neojax.scheduler.auto import Auto
from neojax.scheduler.baselines import DeviceOnly
from neojax.scheduler.plan import Plan
from neojax.scheduler.request import Placement, Request, RequestState
from neojax.scheduler.scheduler import Scheduler
from neojax.scheduler.situation import Situation
from neojax.scheduler.swapping import MIN_STEPS_BETWEEN_MOVES
from tests.scheduler.test_scheduler import make_request, make_scheduler, run_step, run_to_end


def swaps_of(plans: list[Plan]) -> list[tuple[str, Placement]]:
    return [(s.request.request_id, s.placement_to) for plan in plans for s in plan.swaps]


def crowded(**limits: int) -> tuple[Scheduler, list[Request]]:
    """Two requests that outgrow a device of eight blocks together."""
    scheduler = make_scheduler(DeviceOnly(), can_swap=True, **limits)
    requests = [make_request(0, 60, 64), make_request(1, 40, 64)]
    for request in requests:
        scheduler.add(request)
    return scheduler, requests


def test_a_full_device_sends_the_youngest_out_and_takes_it_back():
    scheduler, requests = crowded()
    plans = run_to_end(scheduler)
    assert swaps_of(plans) == [("r1", Placement.HOST), ("r1", Placement.DEVICE)]
    assert scheduler.num_preemptions == 0
    assert [len(r.output_ids) for r in requests] == [64, 64]
    assert not any(plan.b0.host_decodes or plan.b1 for plan in plans)


def test_without_room_on_the_host_it_is_computed_again():
    scheduler, requests = crowded(num_host_blocks=2)
    plans = run_to_end(scheduler)
    assert swaps_of(plans) == []
    assert scheduler.num_preemptions >= 1
    assert [len(r.output_ids) for r in requests] == [64, 64]


def test_a_swap_names_the_tokens_and_the_blocks_that_hold_them():
    scheduler, _ = crowded()
    (swap,) = next(plan.swaps for plan in run_to_end(scheduler) if plan.swaps)
    assert swap.is_out
    assert swap.num_tokens > 40
    assert len(swap.source_blocks) == len(swap.target_blocks) == -(-swap.num_tokens // 16)


def test_the_blocks_it_left_are_free_only_after_that_step():
    scheduler, _ = crowded()
    device = scheduler.pools[Placement.DEVICE]
    while True:
        plan = scheduler.schedule()
        assert plan is not None
        if plan.swaps:
            break
        scheduler.update(plan, [1] * len(plan.sampled_rows))
    assert device.num_retired == len(plan.swaps[0].source_blocks)
    scheduler.update(plan, [1] * len(plan.sampled_rows))
    assert device.num_retired == 0


class Back(Auto):
    """Takes requests back as soon as there is room."""

    name = "back"

    def wants_back(self, now: Situation) -> bool:
        return True


def test_a_request_on_the_host_moves_in_when_the_device_has_room():
    scheduler = make_scheduler(Back(), can_swap=True, num_device_blocks=12)
    first, second = make_request(0, 100, 60), make_request(1, 100, 60)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(5):
        run_step(scheduler)
    assert (first.placement, second.placement) == (Placement.DEVICE, Placement.HOST)
    scheduler.abort("r0")
    plans = run_to_end(scheduler)
    assert swaps_of(plans) == [("r1", Placement.DEVICE)]
    assert all(row.placement is Placement.DEVICE for plan in plans[2:] for row in plan.rows)


class LongOut(Back):
    """Long prompts begin on the host."""

    def place(self, request, possible, room, now):
        return Placement.HOST if len(request.prompt_ids) > 64 else room[0]


@pytest.mark.parametrize(("threshold", "moves"), [(0.7, []), (0.8, [("r1", Placement.DEVICE)])])
def test_requests_move_in_up_to_the_threshold(threshold: float, moves: list):
    # Two blocks of twelve in use, six needed and one to grow into for the other: 75 %.
    scheduler = make_scheduler(
        LongOut(), can_swap=True, num_device_blocks=12, swap_in_threshold=threshold,
        max_num_batched_tokens=128,
    )  # fmt: skip
    scheduler.add(make_request(0, 17, 8))
    scheduler.add(make_request(1, 85, 8))
    plans = [plan for _ in range(3) if (plan := run_step(scheduler)) is not None]
    assert swaps_of(plans) == moves


def test_new_requests_start_in_the_step_that_takes_the_last_one_back():
    scheduler, _ = crowded()
    scheduler.add(make_request(2, 30, 4))
    back = next(p for p in run_to_end(scheduler) if any(not swap.is_out for swap in p.swaps))
    assert [row.request.request_id for row in back.b0.chunks] == ["r2"]


def test_requests_that_were_swapped_out_come_before_new_ones():
    scheduler, requests = crowded()
    late = make_request(2, 30, 4)
    while not scheduler.num_swapped[Placement.HOST]:
        assert run_step(scheduler) is not None
    scheduler.add(late)
    while requests[1].placement is Placement.HOST:
        assert late.state is RequestState.WAITING
        assert run_step(scheduler) is not None
    run_to_end(scheduler)
    assert late.state is RequestState.FINISHED


def test_nobody_is_moved_twice_within_a_few_steps():
    scheduler = make_scheduler(DeviceOnly(), can_swap=True, num_host_blocks=64)
    for i in range(6):
        scheduler.add(make_request(i, 20 + 5 * i, 80))
    moved: dict[str, int] = {}
    for plan in run_to_end(scheduler):
        for swap in plan.swaps:
            last = moved.get(swap.request.request_id)
            on_device = {row.request for row in plan.rows}
            assert last is None or not on_device or plan.step - last >= MIN_STEPS_BETWEEN_MOVES
            moved[swap.request.request_id] = plan.step
    assert scheduler.num_swapped[Placement.HOST] > 2


def test_a_move_to_the_host_that_was_in_flight_is_not_trusted_after_a_failure():
    scheduler, requests = crowded()
    plan = scheduler.schedule()
    while plan is not None and not plan.swaps:
        scheduler.update(plan, [1] * len(plan.sampled_rows))
        plan = scheduler.schedule()
    assert requests[1].placement is Placement.HOST
    scheduler.rollback()
    assert all(r.state is RequestState.WAITING for r in requests)
    run_to_end(scheduler)
    assert [len(r.output_ids) for r in requests] == [64, 64]
