"""The shapes of log probabilities, through OpenAI's client; the fake engine makes them up."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from tests.serve.running_server import RunningServer, script

SAID = "go 🌶️!"
TOKENS = len(SAID.encode()) + 1  # and the end


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": script(say=SAID)}]
    return client.chat.completions.create(model="tiny", messages=messages, **fields)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    prompt = script(say=SAID)
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=50, **fields)


@pytest.mark.parametrize("top", [None, 0, 1, 5, 20])
def test_chat_has_one_entry_per_token_and_bytes_that_join_to_the_text(
    client: openai.OpenAI, top: int | None
):
    fields = {} if top is None else {"top_logprobs": top}
    reply = chat(client, logprobs=True, n=2, **fields)
    for choice in reply.choices:
        content = choice.logprobs.content
        assert len(content) == TOKENS == reply.usage.completion_tokens / 2
        data = b"".join(bytes(token.bytes) for token in content)
        assert data.decode() == SAID + "<|im_end|>"
        for token in content:
            assert token.logprob == -1.5
            assert len(token.top_logprobs) == (top or 0)
            values = [other.logprob for other in token.top_logprobs]
            assert values == sorted(values, reverse=True)
    assert chat(client).choices[0].logprobs is None


@pytest.mark.parametrize("number", [0, 1, 5])
def test_completions_have_offsets_into_their_text(client: openai.OpenAI, number: int):
    choice = complete(client, logprobs=number).choices[0]
    found = choice.logprobs
    assert len(found.tokens) == TOKENS
    assert found.token_logprobs == [-1.5] * TOKENS
    assert found.text_offset[:3] == [0, 1, 2]
    # Four bytes of one character begin at one place, and it is counted when it is whole.
    assert found.text_offset[3:8] == [3, 3, 3, 3, 4]
    assert found.text_offset[-1] == len(SAID) == len(choice.text)
    assert found.tokens[3].startswith("bytes:\\xf0")
    for token, top in zip(found.tokens, found.top_logprobs, strict=True):
        assert token in top
        assert number <= len(top) <= number + 1
        assert sum(map(math.exp, top.values())) > 0


def test_streamed_entries_are_those_of_the_whole_answer(client: openai.OpenAI):
    whole = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    chunks = list(chat(client, logprobs=True, top_logprobs=3, stream=True))
    streamed = [t for c in chunks for x in c.choices if x.logprobs for t in x.logprobs.content]
    assert streamed == whole
    text = complete(client, logprobs=2).choices[0].logprobs
    parts = [c.choices[0].logprobs for c in complete(client, logprobs=2, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item for part in parts if part for item in getattr(part, name)]
        assert joined == getattr(text, name)


def test_a_stop_string_ends_the_entries_with_the_tokens_that_count(server: RunningServer):
    for per in (1, 4):
        reply = server.complete(script(say="abcdef", per=per), logprobs=0, stop="cd").json()
        assert reply["choices"][0]["text"] == "ab"
        assert reply["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c", "d"]
        assert reply["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_the_prompt_from_its_second_token_on(
    client: openai.OpenAI, stream: bool, max_tokens: int
):
    reply = client.completions.create(
        model="tiny", prompt="día", max_tokens=max_tokens, echo=True, logprobs=1, stream=stream
    )
    parts = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
    assert "".join(part.text for part in parts) == "día" + "a" * max_tokens
    assert parts[-1].finish_reason == "length"
    found = [part.logprobs for part in parts if part.logprobs]
    values = [value for part in found for value in part.token_logprobs]
    assert values == [None] + [-1.5] * (3 + max_tokens)
    assert [o for part in found for o in part.text_offset] == [0, 1, 1, 2, 3][: 4 + max_tokens]
    assert found[0].top_logprobs[0] is None


def test_echo_gives_the_prompt_back_also_as_token_ids_and_without_logprobs(server: RunningServer):
    ids = server.post("/tokenize", {"prompt": "abc"}).json()["tokens"]
    for prompt in ("abc", ids):
        choice = server.complete(prompt, echo=True, max_tokens=2).json()["choices"][0]
        assert choice["text"] == "abcab"
        assert choice["logprobs"] is None
    many = server.complete(["abc", "x"], echo=True, max_tokens=1, n=2).json()["choices"]
    assert [choice["text"] for choice in many] == ["abca", "abca", "xa", "xa"]


def test_prompt_logprobs_are_told_by_token_id_as_vllm_does(server: RunningServer):
    choice = server.complete("ab", prompt_logprobs=2, max_tokens=1).json()["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert [entry["decoded_token"] for entry in second.values()] == ["b", "c"]
    assert sorted(entry["rank"] for entry in second.values()) == [1, 2]
    whole = server.chat("ab", prompt_logprobs=0, max_tokens=1).json()
    assert whole["prompt_logprobs"][0] is None
    assert all(len(entry) == 1 for entry in whole["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in server.chat("ab", max_tokens=1).json()


def test_parameters_reach_the_engine_as_they_were_given(server: RunningServer):
    fields = {
        "min_p": 0.25,
        "min_tokens": 2,
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"7": -5, "9": 2.5},
        "priority": -3,
    }
    assert server.complete("abc", max_tokens=4, **fields).status_code == 200
    params = server.events("add")[-1]["params"]
    given = fields | {"logit_bias": {"7": -5.0, "9": 2.5}}
    assert {name: params[name] for name in fields} == given
    schema = {"type": "array", "items": {"type": "integer"}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert server.chat("abc", max_tokens=4, response_format=form).status_code == 200
    assert server.events("add")[-1]["params"]["json_schema"] == (
        '{"type": "array", "items": {"type": "integer"}}'
    )
