"""Where the KV lives and how a step is cut must not change a single token (float32)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from neojax.scheduler.plan import Mode
from neojax.scheduler.request import Placement
from tests.engine.tiny import (
    BASE,
    GREEDY,
    VARIANTS,
    assert_same_tokens,
    dense_logits,
    mixed_requests,
    run_all,
    tiny_model,
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_policy_gives_the_same_tokens(engine_of, variant):
    model = tiny_model(VARIANTS[variant])
    requests = mixed_requests(100 if variant == "gqa3" else 12)
    engine = engine_of(variant, "device-only")
    start = engine.stats()
    expected = run_all(engine, requests)
    assert len({tuple(tokens[:3]) for tokens in expected}) > len(expected) / 2, "dull weights"
    assert engine.stats().steps_pipelined == start.steps_pipelined

    engine.set_policy("full")
    assert_same_tokens(model, requests, expected, run_all(engine, requests))
    assert engine.stats().requests_placed_host == start.requests_placed_host + len(requests)

    engine.set_policy("auto")
    engine.set_block_limit(12)
    before = engine.stats()
    assert_same_tokens(model, requests, expected, run_all(engine, requests))
    stats = engine.stats()
    assert stats.requests_placed_host > before.requests_placed_host
    assert stats.requests_placed_device > before.requests_placed_device

    engine.set_policy("device-only")
    assert_same_tokens(model, requests, expected, run_all(engine, requests))
    assert engine.stats().num_preemptions > stats.num_preemptions


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_of_a_plain_forward_pass(engine_of, variant):
    model = tiny_model(VARIANTS[variant])
    requests = mixed_requests(4, seed=1)
    engine = engine_of(variant, "auto", limit=16)
    for (prompt, _), tokens in zip(requests, run_all(engine, requests), strict=True):
        logits = dense_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :]
        picked = logits[np.arange(len(tokens)), tokens]
        assert (logits.max(axis=-1) - picked < 1e-4 * np.abs(logits).max()).all()


def test_logits_of_both_sides_are_those_of_a_plain_forward_pass(engine_of):
    engine = engine_of()
    prompt = np.random.default_rng(0).integers(0, BASE.vocab_size, 50).tolist()
    expected = dense_logits(tiny_model(), prompt)[-1]
    for placement in ("device", "host"):
        params = dataclasses.replace(GREEDY, kv_placement=placement, max_tokens=1)
        engine.add_request(placement, prompt, params)
        plan = engine.scheduler.schedule()
        assert plan is not None
        handle = engine.runner.enqueue(plan, wants_logits=True)
        got = handle.logits()[0]
        engine.scheduler.update(plan, handle.tokens())
        assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_prompt_of_three_chunks_larger_than_the_device_pool_runs_on_the_host(engine_of):
    prompt = np.random.default_rng(1).integers(0, BASE.vocab_size, 180).tolist()
    requests = [(prompt, GREEDY)]
    expected = run_all(engine_of(policy="device-only"), requests)
    cramped = engine_of(limit=4)
    cramped.add_request("r", prompt, GREEDY)
    tokens, chunks = [], []
    while cramped.has_work:
        result = cramped.step()
        tokens += [t for output in result.outputs for t in output.token_ids]
        if result.plan is not None:
            chunks += [r for r in result.plan.b0.chunks if r.placement is Placement.HOST]
    assert [row.num_tokens for row in chunks] == [64, 64, 52]
    assert [tokens] == expected


def test_prefills_of_both_sides_decodes_and_host_rows_share_a_step(engine_of):
    requests = mixed_requests(24, seed=3)
    engine = engine_of(policy="device-only")
    expected = run_all(engine, requests)
    engine.set_policy("auto")
    engine.set_block_limit(14)
    kinds = set()
    tokens = {}
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
        tokens[str(index)] = []
    while engine.has_work:
        result = engine.step()
        if (plan := result.plan) is not None:
            kinds.add(
                (
                    plan.mode,
                    bool(plan.b0.decodes),
                    bool(plan.b0.host_chunks),
                    len(plan.b0.chunks) > len(plan.b0.host_chunks),
                    bool(plan.b1),
                )
            )
        for output in result.outputs:
            tokens[output.request_id] += output.token_ids
    assert any(kind[0] is Mode.PIPELINED and kind[1] and kind[4] for kind in kinds)
    assert any(kind[2] for kind in kinds)
    assert_same_tokens(tiny_model(), requests, expected, list(tokens.values()))
