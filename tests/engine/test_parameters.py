"""Every sampling parameter through the whole engine, against the model's dense logits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from neojax.sampling_params import SamplingParams
from tests.engine.tiny import BASE, GREEDY, dense_logits, mixed_requests, run_all, tiny_model

V = BASE.vocab_size
REPEATED = [5] * 50
PENALTIES = [
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 1.5},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0},
]


def greedy_reference(prompt, params):
    """Tokens by numpy: penalties over the dense logits, the largest each time."""
    output = []
    for _ in range(params.max_tokens):
        x = dense_logits(tiny_model(), prompt + output)[-1].astype(np.float64)
        seen = np.bincount(output, minlength=V)
        known = (seen > 0) | (np.bincount(prompt, minlength=V) > 0)
        repeated = np.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
        x = np.where(known, repeated, x)
        x -= params.frequency_penalty * seen + params.presence_penalty * (seen > 0)
        for token, bias in params.logit_bias.items():
            x[token] += bias
        output.append(int(x.argmax()))
    return output


def outputs_of(engine, requests):
    """All outputs of each request."""
    found = [[] for _ in requests]
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    while engine.has_work:
        for output in engine.step().outputs:
            found[int(output.request_id)].append(output)
    return found


def log_softmax(logits):
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(("policy", "limit"), [("device-only", None), ("full", None), ("auto", 10)])
def test_penalties_are_token_exact_alone_and_in_a_batch(engine_of, policy, limit):
    engine = engine_of(policy=policy, limit=limit)
    requests = [
        (REPEATED, dataclasses.replace(GREEDY, max_tokens=12, **fields)) for fields in PENALTIES
    ]
    expected = [greedy_reference(*request) for request in requests]
    assert run_all(engine, requests[:1]) == expected[:1]
    crowd = mixed_requests(6, seed=3)
    got = run_all(engine, [*requests, *crowd])
    assert got[: len(requests)] == expected
    assert got[len(requests) :] == run_all(engine, crowd)


def test_penalties_survive_preemption(engine_of):
    engine = engine_of(policy="device-only", limit=10)
    requests = [
        (list(range(40 + i, 80 + i)), dataclasses.replace(GREEDY, max_tokens=50, **fields))
        for i, fields in enumerate(PENALTIES)
    ]
    before = engine.stats().num_preemptions
    got = run_all(engine, requests)
    assert engine.stats().num_preemptions > before
    assert got == [greedy_reference(*request) for request in requests]


def test_penalties_survive_a_failed_step(engine_of, monkeypatch):
    engine = engine_of(policy="full")
    requests = [(REPEATED, dataclasses.replace(GREEDY, max_tokens=12, frequency_penalty=1.0))]
    expected = run_all(engine, requests)
    enqueue, calls = engine.runner.enqueue, []

    def fail_once(plan, **options):
        calls.append(plan)
        if len(calls) == 6:
            raise ValueError("injected")
        return enqueue(plan, **options)

    monkeypatch.setattr(engine.runner, "enqueue", fail_once)
    assert run_all(engine, requests) == expected


def test_logit_bias_steers_and_forbids(engine_of):
    engine = engine_of()
    prompt = list(range(20))
    (plain,) = run_all(engine, [(prompt, GREEDY)])
    params = dataclasses.replace(GREEDY, logit_bias={plain[0]: -100.0, 7: 3.0})
    assert run_all(engine, [(prompt, params)]) == [greedy_reference(prompt, params)]
    forced = dataclasses.replace(GREEDY, logit_bias={7: 100.0})
    assert run_all(engine, [(prompt, forced)]) == [[7] * 16]


def test_min_tokens_forbids_every_end_token_until_then(engine_of):
    engine = engine_of()
    prompt = list(range(20))
    (plain,) = run_all(engine, [(prompt, GREEDY)])
    ends = tuple(dict.fromkeys(plain[:3]))
    params = dataclasses.replace(GREEDY, stop_token_ids=ends, min_tokens=6)
    (outputs,) = outputs_of(engine, [(prompt, params)])
    tokens = [t for output in outputs for t in output.token_ids]
    assert len(tokens) >= 6
    assert not set(tokens[:6]) & set(ends)
    assert dense_logits(tiny_model(), prompt)[-1].argmax() in ends


def test_min_p_of_one_is_greedy(engine_of):
    engine = engine_of()
    prompt = list(range(30))
    certain = SamplingParams(temperature=1.5, min_p=1.0, max_tokens=16, seed=4)
    assert run_all(engine, [(prompt, certain)]) == run_all(engine, [(prompt, GREEDY)])


def test_a_seed_draws_the_same_whatever_features_its_neighbours_use(engine_of):
    engine = engine_of()
    request = (list(range(40)), SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12, seed=11))
    (alone,) = run_all(engine, [request])
    busy = (list(range(9)), dataclasses.replace(GREEDY, presence_penalty=1.0, logprobs=3))
    assert run_all(engine, [busy, request])[1] == alone


@pytest.mark.parametrize("policy", ["device-only", "full"])
def test_logprobs_are_the_log_softmax_of_the_models_logits(engine_of, policy):
    engine = engine_of(policy=policy)
    prompt = list(range(25))
    params = SamplingParams(
        temperature=0.8, top_p=0.5, logit_bias={3: 4.0}, max_tokens=8, seed=1, logprobs=5
    )
    crowd = [
        (p, dataclasses.replace(q, logprobs=i % 3)) for i, (p, q) in enumerate(mixed_requests(3))
    ]
    (outputs, *_) = outputs_of(engine, [(prompt, params), *crowd])
    tokens = [t for output in outputs for t in output.token_ids]
    expected = log_softmax(dense_logits(tiny_model(), prompt + tokens))[len(prompt) - 1 :]
    found = [scores for output in outputs for scores in output.logprobs]
    assert [scores.token_id for scores in found] == tokens
    for scores, row in zip(found, expected, strict=False):
        assert scores.logprob == pytest.approx(row[scores.token_id], abs=1e-3)
        assert scores.rank == 1 + (row > row[scores.token_id]).sum()
        assert scores.top_ids == np.argsort(-row)[:5].tolist()
        assert scores.top_logprobs == pytest.approx(np.sort(row)[::-1][:5], abs=1e-3)


@pytest.mark.parametrize(("policy", "limit"), [("device-only", None), ("full", None), ("auto", 12)])
def test_prompt_logprobs_equal_a_direct_forward_pass(engine_of, policy, limit):
    engine = engine_of(policy=policy, limit=limit)
    rng = np.random.default_rng(2)
    requests = [
        (
            rng.integers(0, V, length).tolist(),
            dataclasses.replace(GREEDY, max_tokens=number, prompt_logprobs=number),
        )
        for length, number in ((150, 2), (1, 1), (70, 0), (2, 0), (40, 3))
    ]
    found = outputs_of(engine, [*requests, *mixed_requests(4)])
    for (prompt, params), outputs in zip(requests, found, strict=False):
        first, *later = outputs
        assert all(output.prompt_logprobs is None for output in later)
        scores = first.prompt_logprobs
        assert scores[0] is None
        expected = log_softmax(dense_logits(tiny_model(), prompt))
        assert [s.token_id for s in scores[1:]] == prompt[1:]
        for s, row in zip(scores[1:], expected, strict=False):
            assert s.logprob == pytest.approx(row[s.token_id], abs=1e-3)
            assert s.top_ids == np.argsort(-row)[: params.prompt_logprobs].tolist()
        assert sum(len(output.token_ids) for output in outputs) == params.max_tokens
        assert outputs[-1].finish_reason == "length"


def test_logits_that_are_not_finite_end_their_request_alone_and_are_counted(engine_of):
    engine = engine_of()
    good = (list(range(50, 80)), GREEDY)
    expected = run_all(engine, [good])
    ends = engine.runner._state.ends
    poisoned = 17
    engine.runner._state.ends = tuple(
        leaf.at[poisoned].set(np.inf) if leaf.shape[0] == V and i == 0 else leaf
        for i, leaf in enumerate(ends)
    )
    before = engine.stats().num_not_finite
    try:
        sampled = SamplingParams(temperature=1.0, max_tokens=4)
        penalised = dataclasses.replace(GREEDY, presence_penalty=1.0)
        for params in (GREEDY, sampled, penalised):
            bad, fine = outputs_of(engine, [([poisoned], params), good])
            assert [output.finish_reason for output in bad] == ["error"]
            assert "not finite" in bad[0].message
            assert [[t for output in fine for t in output.token_ids]] == expected
    finally:
        engine.runner._state.ends = ends
    assert engine.stats().num_not_finite == before + 3


def test_what_the_vocabulary_does_not_hold_is_refused(engine_of):
    engine = engine_of()
    for fields in ({"logit_bias": {V: 1.0}}, {"stop_token_ids": (V,)}, {"logit_bias": {-1: 1.0}}):
        with pytest.raises(
            ValueError, match=rf"{next(iter(fields))}: token -?\d+ is not in 0..{V - 1}"
        ):
            engine.add_request("r", [1], SamplingParams(**fields))
    with pytest.raises(ValueError, match="one answer"):
        engine.add_request("r", [1], SamplingParams(n=2))
