"""Every bad request is a JSON 4xx that names the fault, and the server serves on."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from tests.serve.errors import expect_error
from tests.serve.running_server import TLS, RunningServer, script, wait_for

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [1, "a"], None, 7, {}])
def test_a_prompt_without_tokens_is_refused(server: RunningServer, prompt: object):
    error = expect_error(server.complete(prompt))
    assert error["type"] == "BadRequestError"
    assert error["param"] == "prompt"


@pytest.mark.parametrize("ids", [[259], [-1], [2**40], [[1], [259]]])
def test_token_ids_outside_the_vocabulary_are_refused(server: RunningServer, ids: object):
    assert "0..258" in expect_error(server.complete(ids))["message"]


@pytest.mark.parametrize("ids", [[True], [1.5], [[1], 2], [None]])
def test_token_ids_that_are_no_integers_are_refused(server: RunningServer, ids: object):
    assert expect_error(server.complete(ids))["param"] == "prompt"


@pytest.mark.parametrize("value", [0, -1, "ten", 1.5, 2**63, True, []])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_impossible_max_tokens_are_refused(server: RunningServer, field: str, value: object):
    assert expect_error(server.chat("hi", **{field: value}))["param"] == field
    if field == "max_tokens":
        assert expect_error(server.complete("hi", max_tokens=value))["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1000),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.0),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", [1]),
        ("stop", "x" * 2000),
        ("stop_token_ids", [259]),
        ("stop_token_ids", ["a"]),
        ("n", 0),
        ("n", 129),
        ("kv_placement", "gpu"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("ignore_eos", 1),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_name(
    server: RunningServer, field: str, value: object
):
    for path, body in [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [user("a")]})]:
        error = expect_error(server.post(path, {**body, field: value}))
        assert field in error["param"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("best_of", 2),
        ("suffix", "x"),
        ("top_logprobs", 3),
    ],
)
def test_a_known_field_that_is_not_served_yet_is_refused(
    server: RunningServer, field: str, value: object
):
    error = expect_error(server.complete("a", **{field: value}))
    assert error["param"] == field
    assert "not supported" in error["message"]


def test_neutral_values_null_and_unknown_fields_are_accepted(server: RunningServer):
    neutral = {
        "n": 1,
        "best_of": 1,
        "logprobs": None,
        "echo": False,
        "presence_penalty": 0.0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": None,
        "stop": None,
        "temperature": None,
        "ignore_eos": None,
        "user": "me",
        "an_unknown_field": {"a": 1},
    }
    assert server.complete("a", **neutral).status_code == 200


def test_zero_max_tokens_need_echo_or_prompt_logprobs(server: RunningServer):
    for fields in ({}, {"logprobs": 1}, {"echo": False}):
        assert expect_error(server.complete("a", max_tokens=0, **fields))["param"] == "max_tokens"
    assert expect_error(server.chat("a", max_tokens=0))["param"] == "max_tokens"
    for fields in ({"echo": True, "logprobs": 1}, {"echo": True}, {"prompt_logprobs": 0}):
        reply = server.complete("Answer: yes", max_tokens=0, **fields)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"191222": -100}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"1": 1e9}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {str(i): 0 for i in range(301)}),
        ("logit_bias", [1]),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 11),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_tokens", -1),
        ("prompt_logprobs", 21),
        ("priority", 2**31),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": "x"}}),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(
    server: RunningServer, field: str, value: object
):
    for reply in (server.complete("a", **{field: value}), server.chat("a", **{field: value})):
        assert field in (expect_error(reply)["param"] or "")


def test_logprobs_beyond_each_api_s_limit_are_refused(server: RunningServer):
    assert expect_error(server.complete("a", logprobs=6))["param"] == "logprobs"
    assert expect_error(server.complete("a", logprobs=True))["param"] == "logprobs"
    assert expect_error(server.chat("a", logprobs=True, top_logprobs=21))["param"] == "top_logprobs"
    assert expect_error(server.chat("a", top_logprobs=3))["param"] == "top_logprobs"
    assert expect_error(server.complete("a", prompt_logprobs=1, stream=True))["param"] == (
        "prompt_logprobs"
    )
    assert server.complete("a", logprobs=False).status_code == 200


def test_parameters_that_exclude_each_other_are_refused(server: RunningServer):
    reply = server.complete("a", min_tokens=3, response_format={"type": "json_object"})
    assert "json_schema" in expect_error(reply)["message"]
    reply = server.complete("a", min_tokens=9, max_tokens=8)
    assert "max_tokens (8)" in expect_error(reply)["message"]
    reply = server.chat("a", response_format={"type": "json_schema"})
    assert "json_schema" in expect_error(reply)["message"]


@pytest.mark.parametrize("length", [512, 562])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_is_a_400_with_both_numbers(
    server: RunningServer, length: int, stream: bool
):
    error = expect_error(server.complete([7] * length, stream=stream))
    assert "context_length_exceeded" in error["message"]
    assert str(length) in error["message"]
    assert "512" in error["message"]
    error = expect_error(server.chat("x" * length, stream=stream))
    assert "context_length_exceeded" in error["message"]
    assert error["param"] == "messages"


def test_the_last_place_of_the_context_gives_one_token(server: RunningServer):
    reply = server.complete([7] * 511).json()
    assert reply["usage"] == {"prompt_tokens": 511, "completion_tokens": 1, "total_tokens": 512}
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("asked", [1024, 2**31 - 1, 2**63 - 1])
def test_max_tokens_beyond_the_context_is_clamped_in_both_apis(server: RunningServer, asked: int):
    reply = server.complete([7] * 500, max_tokens=asked, ignore_eos=True).json()
    assert reply["usage"]["completion_tokens"] == 12
    assert reply["choices"][0]["finish_reason"] == "length"
    chat = server.chat("x" * 400, max_completion_tokens=asked, ignore_eos=True).json()
    assert chat["usage"]["total_tokens"] == 512


def test_chat_without_max_tokens_runs_to_the_end_of_the_context(server: RunningServer):
    usage = server.chat("letters").json()["usage"]
    assert usage["total_tokens"] == 512


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


BAD_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 7, "content": "x"}], "messages[0].role"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([user("a"), user(7)], "messages[1].content"),
        ([user(None)], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0]"),
        ([{"role": "assistant", "tool_calls": [BAD_CALL]}], "messages[0].tool_calls[0].function"),
        ([user([{"type": "text"}])], "messages[0].content"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "messages[0].content"),
    ],
)
def test_malformed_messages_are_refused_with_the_path_of_the_fault(
    server: RunningServer, messages: object, path: str
):
    error = expect_error(server.post(CHAT, {"messages": messages}))
    assert error["param"] == path


def test_text_parts_and_tool_history_render_like_plain_strings(server: RunningServer):
    plain = server.chat("ab", max_tokens=1).json()["usage"]
    one_part = [{"type": "text", "text": "ab"}]
    assert server.chat(one_part, max_tokens=1).json()["usage"] == plain
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (
        server.chat(parts, max_tokens=1).json()["usage"]["prompt_tokens"] - 1
        <= (plain["prompt_tokens"])
    )
    good_call = {**BAD_CALL, "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [
        user("a"),
        {"role": "assistant", "content": None, "tool_calls": [good_call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    assert server.post(CHAT, {"messages": history, "max_tokens": 1}).status_code == 200
    assert "None" not in server.events("add")[-1]["prompt"]


def test_a_request_id_comes_back_and_a_bad_one_is_replaced(server: RunningServer):
    given = server.get("/v1/models", headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    for bad in ("x" * 129, "a b", "\xe4"):
        reply = server.get("/v1/models", headers={"X-Request-Id": bad.encode("latin-1")})
        assert 0 < len(reply.headers["x-request-id"]) <= 64
        assert reply.headers["x-request-id"] != bad


def test_the_id_of_a_request_is_in_the_answer_the_log_and_the_engine(server: RunningServer):
    for headers, body, expected in [
        ({"X-Request-Id": "from-header"}, {}, "from-header"),
        ({"X-Request-Id": "from-header"}, {"request_id": "from-body.1"}, "from-body.1"),
    ]:
        reply = httpx.post(
            server.url + COMPLETIONS, json={"prompt": "a", "n": 2, **body}, headers=headers
        )
        assert reply.json()["id"] == f"cmpl-{expected}"
        assert reply.headers["x-request-id"] == expected
        ids = [event["id"] for event in server.events("add")[-2:]]
        assert all(engine_id.startswith(f"{expected}-") for engine_id in ids)
        line = wait_for(
            lambda name=expected: [x for x in server.lines if f"request_id={name} " in x], "no line"
        )[0]
        assert "prompt_tokens=1 completion_tokens=32" in line
    again = [server.complete("a", request_id="twice").status_code for _ in range(2)]
    assert again == [200, 200]
    for bad in ("", "a b", "x" * 129, "é", 7):
        assert expect_error(server.complete("a", request_id=bad))["param"] == "request_id"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1/messages"])
def test_an_api_for_more_than_text_answers_that_it_is_not_there(server: RunningServer, path: str):
    error = expect_error(server.post(path, {"input": "a"}), 501)
    assert error["type"] == "NotImplementedError"
    assert path in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", COMPLETIONS, 405), ("POST", "/health", 405)],
)
def test_unknown_urls_and_methods_answer_in_the_same_shape(
    server: RunningServer, method: str, path: str, status: int
):
    expect_error(httpx.request(method, server.url + path, verify=TLS), status)


def test_an_unknown_model_is_a_404_that_lists_the_served_one(
    server: RunningServer, client: openai.OpenAI
):
    with pytest.raises(openai.NotFoundError, match="served: tiny") as caught:
        client.completions.create(model="gpt-9", prompt="a")
    assert caught.value.body["param"] == "model"  # type: ignore[index]
    expect_error(server.get("/v1/models/gpt-9"), 404)
    assert client.models.retrieve("tiny").id == "tiny"
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_template_variables_that_would_replace_the_conversation_are_refused(
    server: RunningServer,
):
    error = expect_error(server.chat("a", chat_template_kwargs={"messages": []}))
    assert error["param"] == "chat_template_kwargs"
    assert server.chat("a", chat_template_kwargs={"x": 1}, max_tokens=1).status_code == 200


def test_tokenize_and_detokenize_are_inverse(server: RunningServer):
    text = "héllo 🌶️"
    reply = server.post("/tokenize", {"prompt": text}).json()
    assert reply["count"] == len(reply["tokens"]) == len(text.encode())
    assert reply["max_model_len"] == 512
    assert server.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": [user(text)]}).json()
    usage = server.chat(text, max_tokens=1).json()["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    expect_error(server.post("/tokenize", {}))
    expect_error(server.post("/tokenize", {"prompt": "a", "messages": [user("a")]}))
    assert expect_error(server.post("/detokenize", {"tokens": [999]}))["param"] == "tokens"


def test_a_request_that_the_engine_rejects_is_a_400(server: RunningServer):
    for stream in (False, True):
        error = expect_error(server.complete(script(reject=True), stream=stream))
        assert error["message"] == "never fits"


def test_bad_requests_do_not_hurt_the_neighbours(server: RunningServer):
    with httpx.stream(
        "POST",
        server.url + COMPLETIONS,
        json={"prompt": script(delay=0.005), "max_tokens": 100, "stream": True},
        timeout=60,
        verify=TLS,
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        for body in ({"prompt": [999]}, {"prompt": ""}, {"prompt": "a", "max_tokens": -1}):
            expect_error(server.post(COMPLETIONS, body))
        texts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert texts[-1]["choices"][0]["finish_reason"] == "length"
