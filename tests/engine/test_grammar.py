"""JSON schemas: random models write valid JSON, beside others, wherever the KV lives."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from neojax.engine.grammar import GrammarCompiler
from neojax.sampling_params import SamplingParams
from neojax.text.tokenizer import Tokenizer
from tests.engine.tiny import BASE, GREEDY, tiny_engine, tiny_model
from tests.tiny_checkpoint import EOS, byte_tokenizer

MODEL = dataclasses.replace(BASE, vocab_size=300)  # padded beyond the tokenizer's 259
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,5}$"},
        "size": {"enum": ["small", "large"]},
        "on": {"type": "boolean"},
    },
    "required": ["name", "size", "on"],
    "additionalProperties": False,
}
PROMPT = list(range(30))


def tokenizer():
    backend = byte_tokenizer()
    return Tokenizer(backend, eos_token=EOS, eos_ids=frozenset({backend.token_to_id(EOS)}))


@pytest.fixture(scope="module")
def engine():
    engine = tiny_engine(
        tiny_model(MODEL), eos_ids=tokenizer().eos_ids, grammars=GrammarCompiler(tokenizer, 300)
    )
    yield engine
    engine.close()


def run(engine, requests):
    """Token ids and the last output of each request."""
    tokens, last = [[] for _ in requests], [None for _ in requests]
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    while engine.has_work:
        for output in engine.step().outputs:
            tokens[int(output.request_id)] += output.token_ids
            last[int(output.request_id)] = output
    assert engine.stats().device_kv_usage == engine.stats().host_kv_usage == 0
    return tokens, last


def constrained(seed, **fields):
    return SamplingParams(temperature=1.5, seed=seed, max_tokens=150, json_schema=SCHEMA, **fields)


@pytest.mark.parametrize("policy", ["device-only", "full"])
def test_a_random_model_writes_json_of_the_schema(engine, policy):
    engine.set_policy(policy)
    plain = (PROMPT, dataclasses.replace(GREEDY, max_tokens=40))
    alone, _ = run(engine, [plain])
    requests = [(PROMPT[: 5 + i], constrained(i)) for i in range(5)]
    tokens, last = run(engine, [*requests, plain])
    assert tokens[-1] == alone[0]
    for ids, output in zip(tokens[:-1], last[:-1], strict=True):
        value = json.loads(tokenizer().decode(ids))
        assert set(value) == {"name", "size", "on"}
        assert 1 <= len(value["name"]) <= 5
        assert value["size"] in ("small", "large")
        assert isinstance(value["on"], bool)
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
    again, _ = run(engine, requests[3:4])
    assert again[0] == tokens[3]


def test_json_object_is_any_object(engine):
    params = SamplingParams(temperature=0.0, max_tokens=60, json_schema='{"type": "object"}')
    (ids,), (output,) = run(engine, [(PROMPT, params)])
    text = tokenizer().decode(ids)
    assert text.startswith("{")
    assert output.finish_reason in ("stop", "length")


def test_greedy_follows_the_likeliest_that_the_grammar_allows(engine):
    params = dataclasses.replace(GREEDY, json_schema='{"enum": ["abc", "xyz"]}')
    (ids,), _ = run(engine, [(PROMPT, params)])
    assert tokenizer().decode(ids) in ('"abc"', '"xyz"')


def test_a_constrained_request_survives_preemption(engine):
    engine.set_policy("device-only")
    engine.set_block_limit(9)
    try:
        requests = [(list(range(40 + i)), constrained(i)) for i in range(4)]
        expected = [run(engine, [request])[0][0] for request in requests]
        assert run(engine, requests)[0] == expected
    finally:
        engine.set_block_limit(None)
        engine.set_policy("auto")


@pytest.mark.parametrize(
    "schema", ['{"type": "objct"}', "{", "5", '{"$ref": "http://example.com/x"}']
)
def test_a_schema_that_cannot_be_read_is_refused_and_others_go_on(engine, schema):
    bad = dataclasses.replace(GREEDY, json_schema=schema)
    (ids, _), (output, fine) = run(engine, [(PROMPT, bad), (PROMPT, GREEDY)])
    assert ids == []
    assert output.finish_reason == "rejected"
    assert output.message.startswith("json_schema: ")
    assert fine.finish_reason == "length"


def test_a_request_may_be_aborted_while_its_schema_compiles(engine):
    engine.add_request("r", PROMPT, constrained(0))
    engine.abort("r")
    assert not engine.has_work
    engine.add_request("r", PROMPT, constrained(0))
    deadline = time.monotonic() + 120
    while engine.step().plan is None:
        assert time.monotonic() < deadline
    engine.abort("r")
    while engine.has_work:
        engine.step()


def test_an_engine_without_a_tokenizer_refuses_schemas(engine_of):
    with pytest.raises(ValueError, match="no tokenizer"):
        engine_of().add_request("r", PROMPT, constrained(0))
