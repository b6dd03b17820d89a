"""The step loop under aborts, failures and late host jobs."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from neojax.engine.core import EngineDead
from neojax.runner.step_handle import HostLaneError, StepHandle
from neojax.sampling_params import SamplingParams
from tests.engine.faults import assert_only_the_host_fails, fail_launch
from tests.engine.tiny import BASE, GREEDY, mixed_requests, run_all

RANDOM = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, max_tokens=12, seed=11)


def outputs_of(engine):
    """Step until nothing is left; everything it gave."""
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    return outputs


def test_two_steps_are_in_flight_before_tokens_are_read(engine_of):
    engine = engine_of()
    engine.add_request("r", [1, 2, 3], GREEDY)
    first = engine.step()
    assert first.plan is not None
    assert first.completed is None
    second = engine.step()
    assert second.plan is not None
    assert second.completed is first.plan
    engine.abort("r")
    while engine.has_work:
        engine.step()


def test_a_stop_token_costs_one_wasted_row_and_no_output(engine_of):
    engine = engine_of()
    prompt = list(range(30))
    (tokens,) = run_all(engine, [(prompt, GREEDY)])
    stop = tokens[4]
    params = dataclasses.replace(GREEDY, stop_token_ids=(stop,))
    engine.add_request("r", prompt, params)
    outputs = outputs_of(engine)
    assert [t for o in outputs for t in o.token_ids] == tokens[: tokens.index(stop) + 1]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_reason == stop


def test_a_seed_gives_the_same_tokens_whatever_else_runs(engine_of):
    engine = engine_of()
    request = (list(range(40)), RANDOM)
    (alone,) = run_all(engine, [request])
    crowd = [(p, dataclasses.replace(RANDOM, seed=i)) for i, (p, _) in enumerate(mixed_requests(6))]
    assert run_all(engine, [*crowd, request])[-1] == alone
    engine.set_policy("full")
    assert run_all(engine, [request, *crowd])[0] == alone
    assert run_all(engine, [(request[0], dataclasses.replace(RANDOM, seed=12))])[0] != alone


def test_aborts_at_any_moment_leave_no_block_behind(engine_of):
    engine = engine_of(limit=12)
    rng = np.random.default_rng(0)
    requests = mixed_requests(30, seed=5)
    expected = run_all(engine, requests)
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(requests))}
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    aborted = set()
    while engine.has_work:
        for output in engine.step().outputs:
            tokens[output.request_id] += output.token_ids
        if rng.random() < 0.3:
            victim = str(rng.integers(len(requests)))
            aborted.add(victim)
            engine.abort(victim)
            engine.abort("never heard of")
    engine.scheduler.check_integrity()
    assert engine.stats().device_kv_usage == engine.stats().host_kv_usage == 0
    totals = engine.stats().totals
    assert totals is not None
    assert sum(totals.queue_s.counts) >= sum(totals.prefill_s.counts) > len(requests)
    assert sum(totals.tokens.counts) > 0
    assert min(totals.seconds.values()) > 0
    for index, ids in enumerate(expected):
        if str(index) not in aborted:
            assert tokens[str(index)] == ids


def test_late_host_jobs_change_no_token(engine_of):
    engine = engine_of(policy="full")
    requests = mixed_requests(5, seed=8)
    expected = run_all(engine, requests)
    assert engine.runner.host is not None
    engine.runner.host.lane.set_delay_us(20_000)
    try:
        assert run_all(engine, requests) == expected
        # The last step of a lone request ends right after a late job of its last layer.
        assert run_all(engine, requests[:1]) == expected[:1]
    finally:
        engine.runner.host.lane.set_delay_us(0)


def test_freed_slots_full_of_nan_reach_nobody(engine_of):
    engine = engine_of(policy="device-only")
    requests = mixed_requests(6, seed=4)
    expected = run_all(engine, requests)
    state = engine.runner._state
    state.pools = [type(kv)(*(jax.numpy.full_like(x, np.nan) for x in kv)) for kv in state.pools]
    assert run_all(engine, requests) == expected


def test_a_failed_dispatch_is_recovered_without_losing_a_token(engine_of, monkeypatch):
    engine = engine_of(limit=20)
    requests = mixed_requests(10, seed=6)
    expected = run_all(engine, requests)
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")
    fail_launch(engine, monkeypatch, 7, error, loses_pools=True)
    assert run_all(engine, requests) == expected


def test_an_interrupt_while_launching_leaves_an_engine_that_works(engine_of, monkeypatch):
    engine = engine_of(limit=20)
    requests = mixed_requests(8, seed=6)
    expected = run_all(engine, requests)
    fail_launch(engine, monkeypatch, 3, KeyboardInterrupt())
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(f"lost-{index}", prompt, params)
    with pytest.raises(KeyboardInterrupt):
        outputs_of(engine)
    for index in range(len(requests)):
        engine.abort(f"lost-{index}")
    assert not engine.has_work
    assert run_all(engine, requests) == expected


def test_a_job_that_fails_in_the_library_fails_its_rows_and_nobody_else(engine_of):
    engine = engine_of()

    def break_fourth(number):
        if number == 4:
            engine.runner.host.lane.fail_next_job("injected in the library")

    assert_only_the_host_fails(engine, "injected in the library", break_fourth)


def test_a_second_failure_at_once_ends_the_engine(engine_of, monkeypatch):
    engine = engine_of()
    engine._steps_since_failure = 100
    with monkeypatch.context() as patch:

        def fail(_plan):
            raise jax.errors.JaxRuntimeError("INTERNAL: injected")

        patch.setattr(engine.runner, "enqueue", fail)
        engine.add_request("r", [1, 2, 3], GREEDY)
        assert engine.step().outputs == []
        with pytest.raises(EngineDead, match="injected"):
            engine.step()
    engine._steps_since_failure = 100
    engine.abort("r")


def test_a_workers_error_fails_the_host_rows_and_nobody_else(engine_of, monkeypatch):
    tokens, handles = StepHandle.tokens, []

    def fail_fourth(handle):
        handles.append(handle)
        if len(handles) == 4:
            raise HostLaneError("block table out of range")
        return tokens(handle)

    def break_first(number):
        if number == 1:
            monkeypatch.setattr(StepHandle, "tokens", fail_fourth)

    assert_only_the_host_fails(engine_of(), "block table out of range", break_first)


def test_requests_that_cannot_be_served_are_refused(engine_of):
    engine = engine_of()
    for prompt, match in (
        ([], "no tokens"),
        ([BASE.vocab_size], "outside the vocabulary"),
        ([1] * 256, "max_model_len is 256"),
    ):
        with pytest.raises(ValueError, match=match):
            engine.add_request("bad", prompt, GREEDY)
    assert not engine.has_work


def test_max_tokens_is_clamped_to_the_context(engine_of):
    engine = engine_of()
    params = SamplingParams(temperature=0.0, max_tokens=None)
    (tokens,) = run_all(engine, [([1] * 240, params)])
    assert len(tokens) == 16


def test_policy_and_limit_change_only_when_idle(engine_of):
    engine = engine_of()
    engine.add_request("r", [1], GREEDY)
    with pytest.raises(RuntimeError, match="while no request"):
        engine.set_policy("full")
    with pytest.raises(RuntimeError, match="while no request"):
        engine.set_block_limit(3)
    engine.abort("r")
    with pytest.raises(ValueError, match="between 0 and 64"):
        engine.set_block_limit(65)


def test_pools_stay_where_they_are(engine_of):
    engine = engine_of()
    run_all(engine, mixed_requests(2))
    kv = engine.runner._state.pools
    before = [x.unsafe_buffer_pointer() for layer in kv for x in layer]
    run_all(engine, mixed_requests(4, seed=9))
    engine.set_policy("full")
    run_all(engine, mixed_requests(4, seed=9))
    kv = engine.runner._state.pools
    assert [x.unsafe_buffer_pointer() for layer in kv for x in layer] == before
