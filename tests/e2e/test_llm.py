"""`LLM` with the default model: answers, and the same tokens wherever the KV lives."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from neojax import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = [
    "1, 2, 3, 4, 5,",
    "The capital of Italy is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "The opposite of hot is",
    "Q: What do bees make?\nA:",
    "Monday, Tuesday, Wednesday,",
]


@pytest.fixture(scope="module")
def llm(default_checkpoint):
    del default_checkpoint  # fetched, so that its progress is not part of a test
    llm = LLM(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, cpu_kv_gib=0.2)
    yield llm
    llm.close()


def tokens_of(llm, policy, limit=None):
    llm.set_policy(policy)
    llm.set_block_limit(limit)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.set_block_limit(None)
    return [output.outputs[0].token_ids for output in outputs]


def test_eight_prompts_give_the_same_tokens_under_every_policy(llm):
    expected = tokens_of(llm, "device-only")
    before = llm.engine.stats()
    for policy, limit in (("full", None), ("auto", 6), ("device-only", 5)):
        got = tokens_of(llm, policy, limit)
        for prompt, a, b in zip(PROMPTS, expected, got, strict=True):
            assert a == b or is_tie(llm, prompt, a, b), (policy, prompt)
    after = llm.engine.stats()
    assert after.requests_placed_host > before.requests_placed_host
    assert after.requests_swapped_out > before.requests_swapped_out
    assert after.num_compiles_after_ready == 0


def is_tie(llm, prompt, a, b):
    """Whether the first different tokens are equally likely, by the engine's own logits."""
    at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    llm.set_policy("device-only")
    llm.engine.add_request("tie", llm.tokenizer.encode(prompt) + a[:at], params)
    plan = llm.engine.scheduler.schedule()
    handle = llm.engine.runner.enqueue(plan, wants_logits=True)
    logits = handle.logits()[0]
    llm.engine.scheduler.update(plan, handle.tokens())
    return abs(logits[a[at]] - logits[b[at]]) < 1e-4 * np.abs(logits).max()


def test_chat_answers_a_question(llm):
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}], GREEDY, use_tqdm=False
    )
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None
    assert "<|im_end|>" not in output.outputs[0].text


def test_a_stop_string_ends_the_text_before_it(llm):
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=("9, 10",))
    (output,) = llm.generate("1, 2, 3, 4, 5,", params, use_tqdm=False)
    assert output.outputs[0].text == " 6, 7, 8, "
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == "9, 10"


def test_prompts_may_be_texts_token_ids_or_one_of_them(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    by_text = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    by_ids = llm.generate(ids, GREEDY, use_tqdm=False)
    many = llm.generate([PROMPTS[0], ids], GREEDY, use_tqdm=False)
    texts = {output.outputs[0].text for output in [*by_text, *by_ids, *many]}
    assert len(texts) == 1
    assert by_ids[0].prompt is None


def test_one_bad_prompt_runs_none_and_leaves_nothing_behind(llm):
    with pytest.raises(ValueError, match="max_model_len"):
        llm.generate(["fine", [1] * 300], GREEDY, use_tqdm=False)
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.engine.stats().device_kv_usage == 0


def test_step_shows_its_plan_and_outputs(llm):
    llm.engine.add_request("mine", llm.tokenizer.encode("The sky is"), GREEDY)
    first = llm.engine.step()
    assert [row.num_tokens for row in first.plan.rows] == [3]
    second = llm.engine.step()
    assert [output.request_id for output in second.outputs] == ["mine"]
    llm.engine.abort("mine")
    while llm.engine.has_work:
        llm.engine.step()


def test_llm_needs_none_of_the_servers_libraries():
    libraries = "{'fastapi', 'uvicorn', 'pydantic', 'zmq', 'msgspec', 'prometheus_client'}"
    code = f"import sys, neojax.llm; print(sorted({libraries} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
