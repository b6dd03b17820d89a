"""The driver against an engine whose clock stands still unless it works."""

from __future__ import annotations

from typing import Any

import pytest

from neojax.bench.arrivals import Traffic
from neojax.bench.driver import drive
from neojax.bench.measure import measure
from neojax.bench.workload import Lengths
from tests.bench.fakes import FakeClock, FakeEngine


def traffic(
    count: int, *, at_s: tuple[float, ...] | None = None, clients: int | None = None
) -> Traffic:
    return Traffic("test", tuple(Lengths(4 + i, 3) for i in range(count)), at_s, clients)


def test_a_closed_loop_sends_the_next_request_when_one_has_finished():
    clock = FakeClock()
    engine = FakeEngine(clock)
    run = drive(engine, traffic(5, clients=2), clock=clock)
    assert engine.most_at_once == 2
    assert [r.sent_s - run.start_s for r in run.records] == [0, 0, 3, 3, 6]
    assert run.records[4].token_s == [1007, 1008, 1009]
    assert [r.input_tokens for r in run.records] == [4, 5, 6, 7, 8]


def test_an_open_loop_counts_from_when_a_request_was_due_not_from_when_it_was_taken():
    clock = FakeClock()
    engine = FakeEngine(clock, step_s=2.0)
    run = drive(engine, traffic(3, at_s=(0, 0.5, 20)), clock=clock)
    assert [r.sent_s - run.start_s for r in run.records] == [0, 0.5, 20]
    # The second was due half a second into the first step, and had to wait for its end.
    assert run.records[1].ttft_s == 3.5
    # The engine idles until the third is due.
    assert run.records[2].ttft_s == 2


def test_prompts_are_the_seeds_and_have_the_lengths_asked_for():
    prompts = []
    for seed in (1, 1, 2):
        clock = FakeClock()
        engine = FakeEngine(clock)
        drive(engine, traffic(3, at_s=(0, 0, 0)), seed=seed, clock=clock)
        prompts.append(engine.prompts)
    assert prompts[0] == prompts[1] != prompts[2]
    assert [len(p) for p in prompts[0]] == [4, 5, 6]
    assert all(0 <= token < 50 for p in prompts[0] for token in p)


def test_what_is_left_after_the_longest_time_is_aborted_and_says_so():
    clock = FakeClock()
    engine = FakeEngine(clock, places=1)
    run = drive(engine, traffic(4, clients=2), clock=clock, max_s=4.5)
    assert [r.error for r in run.records] == [None, "cut off", "cut off"]
    assert not engine.has_work


@pytest.mark.parametrize("form", [{"clients": 2}, {"at_s": (0, 1, 2, 30)}])
def test_a_refused_request_is_a_record_and_the_rest_goes_on(form: dict[str, Any]):
    clock = FakeClock()
    run = drive(FakeEngine(clock, reject="1"), traffic(4, **form), clock=clock)
    assert [r.error for r in run.records] == [None, "too long", None, None]
    with pytest.raises(ValueError, match=r"0 requests finished.*too long"):
        measure(FakeEngine(clock, reject="0"), traffic(1, clients=1), seed=0, clock=clock)


def test_counters_are_those_of_the_run():
    clock = FakeClock()
    engine = FakeEngine(clock)
    first = measure(engine, traffic(2, clients=2), seed=0, clock=clock)
    second = measure(engine, traffic(4, clients=2), seed=0, clock=clock)
    assert first.counters.steps_device_only == 3
    assert second.counters.steps_device_only == 6
    assert second.summary.requests_per_s == pytest.approx(4 / 6)
