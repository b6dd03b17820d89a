"""`LLM` with several answers, log probabilities and JSON schemas, over a small random model."""

from __future__ import annotations

import json

import pytest

from neojax import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(tiny_checkpoint):
    llm = LLM(
        str(tiny_checkpoint),
        load_format="dummy",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        cpu_kv_gib=0,
    )
    yield llm
    llm.close()


def test_each_of_n_answers_draws_with_its_own_seed(llm):
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=8)
    (output,) = llm.generate("many", params, use_tqdm=False)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    texts = [answer.text for answer in output.outputs]
    assert len(set(texts)) == 3
    later = SamplingParams(temperature=1.0, seed=9, max_tokens=8)
    assert llm.generate("many", later, use_tqdm=False)[0].outputs[0].text == texts[2]


def test_log_probabilities_come_by_token_id(llm):
    params = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=4)
    (output,) = llm.generate("abc", params, use_tqdm=False)
    (answer,) = output.outputs
    assert len(answer.logprobs) == len(answer.token_ids)
    for token_id, place in zip(answer.token_ids, answer.logprobs, strict=True):
        assert place[token_id].rank == 1
        assert len(place) == 2
    assert output.prompt_logprobs[0] is None
    for token_id, place in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    ):
        assert place[token_id].decoded_token in "abc"
        assert place[token_id].logprob <= max(other.logprob for other in place.values())


def test_an_answer_follows_a_schema_and_a_bad_one_is_an_error(llm):
    params = SamplingParams(max_tokens=40, json_schema={"enum": ["yes", "no"]}, seed=1)
    (output,) = llm.generate("well?", params, use_tqdm=False)
    assert json.loads(output.outputs[0].text) in ("yes", "no")
    assert output.outputs[0].finish_reason == "stop"
    bad = SamplingParams(json_schema={"type": "objct"})
    with pytest.raises(ValueError, match="objct"):
        llm.generate("well?", bad, use_tqdm=False)
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("min_tokens", 17),
        ("min_p", 1.5),
        ("presence_penalty", 3.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
        ("logit_bias", {1: 101.0}),
        ("logprobs", 21),
        ("priority", 2**40),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})
