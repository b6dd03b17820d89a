"""Sampling parameters and log probabilities through OpenAI's client and the real engine."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import openai
import pytest

from neojax.models.checkpoint import load_model
from neojax.models.config import ModelConfig
from tests.engine.tiny import dense_logits
from tests.serve.running_server import RunningServer
from tests.tiny_checkpoint import byte_tokenizer

FLAGS = (
    "--load-format", "dummy", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4",
    "--max-num-batched-tokens", "32", "--cpu-kv-gib", "0.01",
)  # fmt: skip
TEXT = "Loglikelihood of a text, in more than one chunk."


@pytest.fixture(scope="module")
def client(tiny_checkpoint: Path) -> Iterator[openai.OpenAI]:
    """OpenAI's client of a server with random weights, which are the same in every process."""
    command = [sys.executable, "-m", "neojax.serve", str(tiny_checkpoint), *FLAGS]
    server = RunningServer([*command, "--served-model-name", "tiny"])
    try:
        server.wait_ready(400)
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            yield client
        assert server.stop() == 0, server.stderr
    finally:
        server.kill()


@pytest.fixture(scope="module")
def log_probs(tiny_checkpoint: Path) -> Any:
    """log_probs(ids): log softmax [T, V] of a direct forward pass over the same weights."""
    config = ModelConfig.from_checkpoint(tiny_checkpoint)
    model = load_model(None, config, dtype=jnp.float32, load_format="dummy", seed=0, progress=False)

    def of(ids: list[int]) -> np.ndarray:
        x = dense_logits(model, ids).astype(np.float64)
        x -= x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    return of


def ids_of(text: str) -> list[int]:
    return byte_tokenizer().encode(text).ids


def complete(client: openai.OpenAI, prompt: Any = TEXT, **fields: Any) -> Any:
    extra = {
        name: fields.pop(name)
        for name in ("top_k", "min_p", "min_tokens", "priority", "ignore_eos", "response_format")
        if name in fields
    }
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **fields)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echoed_loglikelihoods_equal_a_direct_forward_pass(client, log_probs, max_tokens):
    texts = [TEXT, "ab", "Another one"]
    reply = complete(client, texts, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0)
    for text, choice in zip(texts, reply.choices, strict=True):
        ids, found = ids_of(text), choice.logprobs
        expected = log_probs(ids)
        assert choice.text.startswith(text)
        assert found.token_logprobs[0] is None
        assert len(found.tokens) == len(ids) + max_tokens
        for place, token in enumerate(ids[1:], 1):
            row = expected[place - 1]
            assert found.token_logprobs[place] == pytest.approx(row[token], abs=1e-4)
            assert max(found.top_logprobs[place].values()) == pytest.approx(row.max(), abs=1e-4)


def test_streamed_alternatives_are_those_of_their_place(client, log_probs):
    messages: Any = [{"role": "user", "content": "hello"}]
    ask: Any = {
        "model": "tiny", "messages": messages, "logprobs": True, "top_logprobs": 5,
        "max_tokens": 20, "seed": 3, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.chat.completions.create(**ask).choices[0].logprobs.content
    chunks = client.chat.completions.create(stream=True, **ask)
    streamed = [t for c in chunks for x in c.choices if x.logprobs for t in x.logprobs.content]
    assert streamed == whole
    assert len(whole) == 20
    for token in whole:
        values = [other.logprob for other in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-6
    assert len({tuple(o.token for o in t.top_logprobs) for t in whole}) > 1


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-12, 5e-324, -0.0])
def test_tiny_temperatures_are_greedy_over_http(client, temperature):
    greedy = complete(client, max_tokens=8, temperature=0).choices[0].text
    got = complete(client, max_tokens=8, temperature=temperature, top_p=1e-4, seed=1)
    assert got.choices[0].text == greedy


def test_logprobs_are_finite_and_the_models_own_whatever_is_masked(client, log_probs):
    bias = {str(token): -100 for token in range(250)}
    reply = complete(
        client, max_tokens=4, temperature=0.01, top_p=0.3, logprobs=5, logit_bias=bias, seed=0
    )
    found = reply.choices[0].logprobs
    assert all(math.isfinite(v) for top in found.top_logprobs for v in top.values())
    row = np.sort(log_probs(ids_of(TEXT))[-1])[::-1][:5]
    others = sorted(found.top_logprobs[0].values(), reverse=True)[:5]
    assert others == pytest.approx(row.tolist(), abs=1e-4)


def test_each_of_n_choices_draws_with_its_own_seed(client):
    many = complete(client, max_tokens=12, seed=5, n=3, temperature=1.0)
    alone = [complete(client, max_tokens=12, seed=5 + i, temperature=1.0) for i in range(3)]
    assert [c.text for c in many.choices] == [reply.choices[0].text for reply in alone]
    assert len({c.text for c in many.choices}) == 3


def test_penalties_and_min_tokens_change_what_comes(client):
    def text(**fields: Any) -> str:
        return complete(client, "aaaa", max_tokens=24, temperature=0, **fields).choices[0].text

    plain = text(ignore_eos=True)
    apart = text(ignore_eos=True, presence_penalty=2.0, frequency_penalty=2.0)
    assert plain != apart
    assert text(min_tokens=24) is not None
    assert text(priority=5, ignore_eos=True) == plain


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_its_json_schema(client, stream):
    schema = {
        "type": "object",
        "properties": {"word": {"type": "string", "pattern": "^[a-z]{2,4}$"}},
        "required": ["word"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a word"}],
        response_format=form,
        max_tokens=100,
        seed=1,
        stream=stream,
    )
    if stream:
        choices = [chunk.choices[0] for chunk in reply]
        text, reason = "".join(c.delta.content for c in choices), choices[-1].finish_reason
    else:
        text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert 2 <= len(json.loads(text)["word"]) <= 4
    assert reason == "stop"


def test_a_bad_schema_is_a_400_that_says_why(client):
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objct"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="objct"):
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "a"}],
                response_format=form,
                stream=stream,
            )
