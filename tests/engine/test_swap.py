"""Requests that change sides between steps, in a real engine: no token may change (float32)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest

from neojax.sampling_params import SamplingParams
from neojax.scheduler.policy import load_policy
from neojax.scheduler.scheduler import Scheduler
from tests.engine.tiny import (
    BASE,
    GREEDY,
    assert_same_tokens,
    mixed_requests,
    run_all,
    tiny_model,
)
from tests.soak import Conditions, RandomSwapping, Soak


@pytest.fixture(scope="module")
def soak() -> Iterator[Soak]:
    made = Soak(random.SystemRandom().getrandbits(31))
    yield made
    made.close()


@pytest.fixture
def swapping(soak: Soak) -> Iterator[RandomSwapping]:
    """Every decode moves as often as there is room."""
    scheduler = soak.engine.scheduler
    usual = scheduler._swapping
    scheduler._swapping = made = RandomSwapping(soak.engine, random.Random(0), 0.5)
    soak.engine.set_policy("auto")
    soak.engine.set_block_limit(None)
    yield made
    scheduler._swapping = usual


def test_random_swaps_aborts_and_poisoned_blocks_change_no_token(soak: Soak):
    for _ in range(4):
        soak.round(num_requests=10, most_tokens=30)
    assert soak.totals.tokens > 100


def test_modes_change_at_any_step_and_change_no_token(soak: Soak):
    """Groups parked and driven out, under swaps and aborts."""
    before = dataclasses.replace(soak.totals)
    soak.rng.seed(0)  # what happens is at random, that it happens is not
    soak.round(num_requests=30, most_tokens=30, conditions=Conditions(aborts=0.02))
    after = soak.totals
    assert after.steps_rolling > before.steps_rolling
    assert after.steps_pipelined > before.steps_pipelined
    assert after.steps_parked > before.steps_parked


@pytest.mark.slow
def test_modes_change_under_two_hundred_requests_and_change_no_token(soak: Soak):
    before = dataclasses.replace(soak.totals)
    soak.rng.seed(0)
    for change, delay_us in ((1.0, 0), (0.3, 200), (0.02, 0), (0.3, 1500)):
        conditions = Conditions(
            mode_change=change, delay_us=delay_us, aborts=0.05, device_blocks=24, host_blocks=30
        )
        soak.round(num_requests=60, conditions=conditions)
    after = soak.totals
    assert after.requests - before.requests > 150
    assert after.aborted_in_flight > before.aborted_in_flight
    assert after.preemptions > before.preemptions
    assert after.swaps - before.swaps > 100


def test_late_jobs_change_no_token(soak: Soak, swapping: RandomSwapping):
    requests = mixed_requests(8, seed=5)
    host = soak.engine.runner.host
    assert host is not None
    host.lane.set_delay_us(3000)
    got = run_all(soak.engine, requests)
    host.lane.set_delay_us(0)
    assert swapping.count > 10
    swapping.probability = 0.0
    assert_same_tokens(tiny_model(), requests, run_all(soak.engine, requests), got)


def test_a_request_aborted_while_it_moves_leaves_nothing_behind(
    soak: Soak, swapping: RandomSwapping
):
    engine = soak.engine
    params = SamplingParams(temperature=0.0, max_tokens=60)
    requests = [(list(range(i, i + 50)), params) for i in range(6)]
    for i, request in enumerate(requests):
        engine.add_request(str(i), *request)
    aborted = 0
    while engine.has_work:
        plan = engine.step().plan
        if plan is not None and plan.swaps and aborted < 4:
            engine.abort(plan.swaps[0].request.request_id)
            aborted += 1
    assert aborted == 4
    engine.scheduler.check_integrity()
    assert engine.stats().device_kv_usage == engine.stats().host_kv_usage == 0


def test_a_swap_that_fails_costs_its_requests_only(soak: Soak, swapping: RandomSwapping):
    engine = soak.engine
    host = engine.runner.host
    assert host is not None
    requests = mixed_requests(6, seed=9)
    swapping.probability = 0.0
    wanted = run_all(engine, requests)
    for _ in range(12):
        run_all(engine, [([1, 2, 3], GREEDY)])  # failures in quick succession end an engine
    swapping.probability = 0.3
    tokens = [[] for _ in requests]
    failed, injected = set(), False
    for i, request in enumerate(requests):
        engine.add_request(str(i), *request)
    while engine.has_work:
        result = engine.step()
        if not injected and result.plan is not None and result.plan.swaps:
            host.lane.fail_next_job("broken on purpose")
            injected = True
        for output in result.outputs:
            if output.message is not None:
                assert "broken on purpose" in output.message
                failed.add(int(output.request_id))
            tokens[int(output.request_id)] += output.token_ids
    assert injected
    survivors = [i for i in range(len(requests)) if i not in failed]
    assert survivors
    assert_same_tokens(
        tiny_model(),
        [requests[i] for i in survivors],
        [wanted[i] for i in survivors],
        [tokens[i] for i in survivors],
    )


def test_a_step_of_nothing_but_a_swap_runs(soak: Soak, swapping: RandomSwapping):
    engine = soak.engine
    swapping.probability = 1.0
    engine.add_request("r", list(range(40)), SamplingParams(temperature=0.0, max_tokens=12))
    alone, tokens = 0, []
    while engine.has_work:
        result = engine.step()
        for output in result.outputs:
            tokens += output.token_ids
        if (plan := result.plan) is not None:
            alone += bool(plan.swaps) and not any(plan.sub_batches)
            swapping.probability = 0.0 if plan.swaps else 1.0
    assert alone > 3
    swapping.probability = 0.0
    (wanted,) = run_all(engine, [(list(range(40)), GREEDY)])
    assert tokens == wanted[:12]


@pytest.mark.parametrize("policy", ["device-only", "auto"])
def test_a_full_device_swaps_instead_of_computing_again(engine_of, policy: str):
    engine = engine_of(policy="device-only")
    requests = [
        (prompt[:40], dataclasses.replace(params, max_tokens=40))
        for prompt, params in mixed_requests(6, seed=12)
    ]
    expected = run_all(engine, requests)
    usual = engine.scheduler
    engine.scheduler = Scheduler(
        dataclasses.replace(usual.limits, can_swap=True), load_policy(policy)
    )
    try:
        engine.set_block_limit(12)
        got = run_all(engine, requests)
        assert_same_tokens(tiny_model(BASE), requests, expected, got)
        if policy == "device-only":
            assert engine.stats().requests_swapped_out > 0
            assert engine.stats().requests_swapped_in > 0
            assert engine.stats().num_preemptions == 0
    finally:
        engine.scheduler = usual
