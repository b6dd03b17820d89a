"""Bodies nobody would send: every answer is JSON below 500, and nothing is left behind."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import httpx
import pytest

from tests.serve.running_server import RunningServer, wait_for

SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"model": "tiny", "prompt": "abc", "max_tokens": 3, "stop": ["x"], "seed": 1, "n": 2},
        {"prompt": [1, 2, 3], "temperature": 0.5, "top_p": 0.9, "top_k": 5, "logprobs": None},
        {"prompt": [[1], [2, 3]], "stop_token_ids": [1], "ignore_eos": True, "max_tokens": 2},
        {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}},
    ],
    "/v1/chat/completions": [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "t"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "content": "r", "tool_call_id": "1"},
            ],
            "max_completion_tokens": 2,
            "chat_template_kwargs": {"a": 1},
            "tools": [],
            "response_format": {"type": "text"},
        },
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 2},
    ],
    "/tokenize": [{"prompt": "abc"}, {"messages": [{"role": "user", "content": "x"}]}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
ODD = (
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**200, -(2**70), 1e308, -0.0, 5e-324),
    *("", "\0", "\ud800", "a" * 5000, "🌶", "[[{", "{{ x }}", "{% for %}"),
    *([], {}, [[]], [None], [[1], "a"], {"": ""}, {"type": "text"}, {"role": "user"}),
)


def mutate(rng: random.Random, value: Any) -> Any:
    """The value with one place in it changed, removed, wrapped or doubled."""
    if isinstance(value, dict | list) and value and rng.random() < 0.75:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        change = rng.random()
        if change < 0.1:
            del value[key]
        elif change < 0.2 and isinstance(value, list):
            value.insert(key, copy.deepcopy(value[key]))
        elif change < 0.2 and isinstance(value, dict):
            value[rng.choice(["x", "n", "echo", "tools", "logit_bias", "\udfff"])] = copy.deepcopy(
                value[key]
            )
        else:
            value[key] = mutate(rng, value[key])
        return value
    return [value] if rng.random() < 0.1 else copy.deepcopy(rng.choice(ODD))


def body(rng: random.Random, seed: dict[str, Any]) -> bytes:
    """A seed changed once or more, as JSON, one time in five with broken bytes."""
    value = json.loads(json.dumps(seed))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = mutate(rng, value)
    raw = bytearray(json.dumps(value).encode())
    if rng.random() < 0.2:
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(raw) + 1)
            raw[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
    return bytes(raw)


def check(reply: httpx.Response, sent: bytes) -> None:
    assert reply.status_code < 500, (sent, reply.text)
    if reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.text.endswith("data: [DONE]\n\n")
    else:
        decoded = json.loads(reply.content.decode("utf-8"))
        assert reply.status_code == 200 or decoded["error"]["message"], sent


@pytest.mark.parametrize("num_bodies", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_bodies_get_json_and_leave_nothing(server: RunningServer, num_bodies: int):
    rng = random.Random(num_bodies)
    engine = server.events("start")[0]["pid"]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(num_bodies):
            path = rng.choice(list(SEEDS))
            raw = body(rng, rng.choice(SEEDS[path]))
            check(client.post(path, content=raw, headers={"Content-Type": "application/json"}), raw)
    assert [event["pid"] for event in server.events("start")] == [engine]
    wait_for(
        lambda: (
            server.metric("num_requests_running", placement="device") == 0
            and server.metric("num_requests_waiting") == 0
        ),
        "requests are left in the engine",
    )
