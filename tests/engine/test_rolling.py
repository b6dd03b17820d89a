"""ROLLING steps: the same tokens as on the device alone, whatever comes and goes (float32)."""

from __future__ import annotations

import dataclasses
import random
import re

import jax
import numpy as np
import pytest

from neojax.engine.core import EngineCore
from neojax.scheduler.plan import Mode
from neojax.scheduler.policy import load_policy
from neojax.scheduler.request import Placement
from neojax.scheduler.scheduler import Scheduler
from tests.engine.faults import assert_only_the_host_fails, fail_launch
from tests.engine.tiny import (
    BASE,
    GREEDY,
    assert_same_tokens,
    mixed_requests,
    run_all,
    tiny_engine,
    tiny_model,
)
from tests.runner.hlo import sizes_copied
from tests.scheduler.random_modes import RandomModes

CONFIG = dataclasses.replace(BASE, num_layers=4)
REQUESTS = mixed_requests(24, seed=5)


@pytest.fixture(scope="module")
def shared() -> EngineCore:
    engine = tiny_engine(tiny_model(CONFIG), layers_per_program=2, rolling_rows=3)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(shared) -> list[list[int]]:
    shared.set_policy("device-only")
    shared.set_block_limit(None)
    return run_all(shared, REQUESTS)


@pytest.fixture
def engine(shared, expected) -> EngineCore:
    shared.set_policy("rolling")
    shared.set_block_limit(14)
    shared._steps_since_failure = 100
    yield shared
    assert not shared.has_work
    shared.scheduler.check_integrity()


@pytest.mark.parametrize("limit", [14, 0])
def test_rolling_steps_give_the_tokens_of_the_device_alone(engine, expected, limit):
    engine.set_block_limit(limit)
    before = engine.stats()
    got = run_all(engine, REQUESTS)
    assert_same_tokens(tiny_model(CONFIG), REQUESTS, expected, got)
    placed = engine.stats().requests_placed_host - before.requests_placed_host
    assert (placed == len(REQUESTS)) if limit == 0 else (0 < placed < len(REQUESTS))


def test_a_row_advances_by_one_layer_per_step_and_all_kinds_share_a_step(engine):
    """Prefill of both sides, device decodes, and groups at several layers."""
    kinds, entered, waits = set(), {}, set()
    for index, (prompt, params) in enumerate(REQUESTS):
        engine.add_request(str(index), prompt, params)
    while engine.has_work:
        plan = engine.step().plan
        if plan is None or plan.mode is not Mode.ROLLING:
            continue
        kinds.add((bool(plan.b0.host_chunks), bool(plan.b0.decodes), bool(plan.rolling.leaving)))
        step = engine._steps[Mode.ROLLING]
        for row in plan.rolling.leaving:
            waits.add(step - entered.pop(row.request))
        for row in plan.rolling.entering:
            entered[row.request] = step
    assert waits == {CONFIG.num_layers}
    assert any("between two layers" in str(record) for record in engine.explain())
    assert (True, True, True) in kinds


def test_aborts_in_mid_flight_leave_no_block_behind(engine, expected):
    rng = np.random.default_rng(0)
    for index, (prompt, params) in enumerate(REQUESTS):
        engine.add_request(str(index), prompt, params)
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(REQUESTS))}
    aborted, in_mid_flight = set(), 0
    while engine.has_work:
        for output in engine.step().outputs:
            tokens[output.request_id] += output.token_ids
        engine.scheduler.check_integrity()
        running = engine.scheduler.running
        if running and rng.random() < 0.1:
            victim = running[rng.integers(len(running))]
            in_mid_flight += victim.progress.layer > 0
            aborted.add(victim.request_id)
            engine.abort(victim.request_id)
    assert in_mid_flight > 0
    assert engine.stats().device_kv_usage == engine.stats().host_kv_usage == 0
    for index, ids in enumerate(expected):
        if str(index) not in aborted:
            assert tokens[str(index)] == ids


def test_when_all_have_gone_the_groups_run_empty(engine):
    for index, (prompt, params) in enumerate(REQUESTS[:6]):
        engine.add_request(str(index), prompt, params)
    while not any(True for _ in engine.scheduler.rows_under_way):
        engine.step()
    for index in range(6):
        engine.abort(str(index))
    assert engine.has_work
    for _ in range(CONFIG.num_layers + 3):
        engine.step()
    assert not engine.has_work


def test_tables_of_a_group_stay_until_it_has_left(engine):
    """An entry of the lane's ring is not free while a group under way is still to be joined."""
    for index, (prompt, params) in enumerate(REQUESTS[:10]):
        on_host = dataclasses.replace(params, kv_placement="host")
        engine.add_request(str(index), prompt, on_host)
    sizes = set()
    while engine.has_work:
        engine.step()
        for *_, plan, num_rows in engine.runner._register._groups:
            sizes.add(int(num_rows))
            assert not num_rows or engine.runner.host.lane.plan_in_use(int(plan))
    assert {0, 1} <= sizes


def test_late_host_jobs_change_no_token(engine, expected):
    assert engine.runner.host is not None
    engine.runner.host.lane.set_delay_us(3000)
    try:
        assert run_all(engine, REQUESTS[:8]) == expected[:8]
    finally:
        engine.runner.host.lane.set_delay_us(0)


def test_a_failed_dispatch_is_recovered_without_losing_a_token(engine, expected, monkeypatch):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")
    plans = fail_launch(engine, monkeypatch, 12, error, loses_pools=True)
    assert run_all(engine, REQUESTS[:12]) == expected[:12]
    assert any(plan.mode is Mode.ROLLING for plan in plans[:12])


def test_a_job_that_fails_fails_the_rows_under_way_and_nobody_else(engine):
    broken = []

    def break_once(number):
        if not broken and any(True for _ in engine.scheduler.rows_under_way):
            engine.runner.host.lane.fail_next_job("injected in the library")
            broken.append(number)

    assert_only_the_host_fails(engine, "injected in the library", break_once)


@pytest.mark.parametrize("policy", ["rolling", "random"])
def test_turns_on_the_device_change_no_token(engine, policy: str):
    """As short and as many as may be, under ROLLING steps and under any."""
    requests = [(p[:60], dataclasses.replace(q, max_tokens=90)) for p, q in REQUESTS[:10]]
    engine.set_policy("device-only")
    engine.set_block_limit(None)
    expected = run_all(engine, requests)
    usual = engine.scheduler
    limits = dataclasses.replace(usual.limits, can_swap=True, rotate_steps=16)
    made = load_policy("rolling") if policy == "rolling" else RandomModes(random.Random(0))
    engine.scheduler = Scheduler(limits, made)
    turns, moved = 0, set()
    try:
        engine.set_block_limit(28)
        for index, request in enumerate(requests):
            engine.add_request(str(index), *request)
        tokens: list[list[int]] = [[] for _ in requests]
        while engine.has_work:
            result = engine.step()
            for output in result.outputs:
                tokens[int(output.request_id)] += output.token_ids
            engine.scheduler.check_integrity()
            for move in () if result.plan is None else result.plan.moves:
                if "turn" in move.reason:
                    turns += 1
                    moved.add(move.request.request_id)
    finally:
        engine.scheduler = usual
    assert_same_tokens(tiny_model(CONFIG), requests, expected, tokens)
    assert turns > 4
    assert len(moved) > 3


def test_a_seed_gives_the_same_tokens_on_either_side(engine):
    params = dataclasses.replace(GREEDY, temperature=0.9, top_k=40, seed=11)
    prompt = list(range(40))
    tokens = [
        run_all(engine, [(prompt, dataclasses.replace(params, kv_placement=side.value))])
        for side in Placement
    ]
    assert tokens[0] == tokens[1]


def test_nothing_compiles_after_warm_up_and_no_program_copies_a_pool():
    compiled = []
    engine = tiny_engine(
        tiny_model(CONFIG), policy="rolling", layers_per_program=2, rolling_rows=3,
        num_device_blocks=40,
        compiles=lambda runner: compiled.extend(runner.compile(progress=False)),
    )  # fmt: skip
    engine.runner.warm_up()
    pools = [engine.runner._state.pools[0].k.size, engine.runner._state.scratch[0].k.size]
    for signature, program in compiled:
        assert not sizes_copied(program) & set(pools), (signature.name, signature.shape)
    # A hop is one call: each cuts a GPU's graph of kernels in two.
    rolling = [program.as_text() for signature, program in compiled if signature.name == "rolling"]
    assert rolling
    for text in rolling:
        calls = re.findall(r"custom_call_target=\"neojax\.(start|join|exchange)\.v", text)
        assert calls == ["exchange"] * 2
    tables = engine.runner.profile(progress=False)
    assert tables.linear[Mode.ROLLING].xs[-1] == 64 + 3  # with the rows of a group
    engine.set_block_limit(14)
    sampled = [(p, dataclasses.replace(q, temperature=0.8, seed=1)) for p, q in REQUESTS[:6]]
    run_all(engine, [*REQUESTS[:12], *sampled])
    assert engine.runner.num_compiles == 0
    assert {"rolling", "park"} <= {signature.name for signature, _ in compiled}
    engine.close()
