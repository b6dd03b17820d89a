"""What a stream looks like, through OpenAI's client and as raw events."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serve.running_server import RunningServer, script

SAID = "alpha beta gamma delta"
EMOJI = "🌶️ 很抱歉 ďábelské 👨‍👩‍👧"


def ask(text: str, **script_fields: object) -> list[Any]:
    return [{"role": "user", "content": script(say=text, **script_fields)}]


def raw_events(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of each event, decoded; "[DONE]" stays text."""
    reply = server.post(path, {**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_a_chat_stream_says_the_role_first_and_the_finish_reason_last(server: RunningServer):
    events = raw_events(server, "/v1/chat/completions", {"messages": ask(SAID)})
    assert events.pop() == "[DONE]"
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] is None
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert "".join(choice["delta"]["content"] for choice in choices) == SAID
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)


def test_a_completion_stream_has_no_role_chunk(server: RunningServer):
    events = raw_events(server, "/v1/completions", {"prompt": script(say=SAID), "max_tokens": 99})
    assert events.pop() == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == SAID
    assert {event["object"] for event in events} == {"text_completion"}
    assert events[0]["id"].startswith("cmpl-")


@pytest.mark.parametrize(
    ("options", "has_usage"),
    [({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
def test_usage_comes_in_one_last_chunk_and_only_if_asked(
    server: RunningServer, options: dict[str, bool], has_usage: bool
):
    body = {"messages": ask("abc"), "stream_options": options}
    events = raw_events(server, "/v1/chat/completions", body)
    assert events.pop() == "[DONE]"
    if not has_usage:
        assert all("usage" not in event for event in events)
        return
    last = events.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4  # three letters and EOS
    assert all(event["usage"] is None for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_usage_in_every_chunk_counts_the_tokens_so_far(server: RunningServer):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": script(say="abc"), "stream_options": options}
    events = raw_events(server, "/v1/completions", body)[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert events[-1]["choices"] == []


@pytest.mark.parametrize("per", [1, 3, 8])
@pytest.mark.parametrize("stop", [None, "beta gamma", "ta ga", ["a b", "beta"], "🌶", "alpha"])
@pytest.mark.parametrize("text", [SAID, EMOJI])
def test_joined_deltas_equal_the_answer_that_is_not_streamed(
    client: openai.OpenAI, text: str, stop: Any, per: int
):
    fields: dict[str, Any] = {"model": "tiny", "messages": ask(text, per=per)}
    if stop is not None:
        fields["stop"] = stop
    whole = client.chat.completions.create(**fields)
    stream = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    joined = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert joined == whole.choices[0].message.content
    assert stream[-1].usage == whole.usage
    assert stream[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"

    stops = [stop] if isinstance(stop, str) else stop or []
    cuts = [text.index(s) for s in stops if s in text]
    assert joined == text[: min(cuts, default=len(text))]
    assert "�" not in joined


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_of_a_list_of_prompts_has_each_answer_under_its_own_index(
    client: openai.OpenAI, n: int
):
    # Their tokens arrive out of step, the last prompt's first, some of them half a character.
    said = [SAID, EMOJI, "x"]
    prompts = [
        script(say=text, per=per, delay=delay)
        for text, per, delay in zip(said, (1, 3, 8), (0.004, 0.002, 0.0), strict=True)
    ]
    fields: dict[str, Any] = {"model": "tiny", "prompt": prompts, "n": n, "max_tokens": 20}
    whole = client.completions.create(**fields)
    stream = list(
        client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    assert len({chunk.id for chunk in stream}) == 1
    *chunks, last = stream
    assert (last.choices, last.usage) == ([], whole.usage)
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert said[choice.index // n].startswith(choice.text)
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == choice.finish_reason
    assert {c.choices[0].index for c in chunks} == set(range(len(said) * n))
    assert {choice.finish_reason for choice in whole.choices} == {"stop", "length"}
    assert all(len(chunk.choices) == 1 for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_string_that_matched_is_named_and_kept_only_if_asked(
    server: RunningServer, stream: bool
):
    body = {"messages": ask(SAID), "stop": ["zzz", "a gam"], "include_stop_str_in_output": True}
    if stream:
        events = raw_events(server, "/v1/chat/completions", body)[:-1]
        text = "".join(event["choices"][0]["delta"]["content"] for event in events)
        end = events[-1]["choices"][0]
    else:
        end = server.post("/v1/chat/completions", body).json()["choices"][0]
        text = end["message"]["content"]
    assert text == "alpha beta gam"
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", "a gam")


def test_a_stop_string_aborts_the_request_in_the_engine(server: RunningServer):
    # Slow enough that the engine is not done before it hears of the match.
    prompt = script(delay=0.05, tag="stops")
    reply = server.complete(prompt, stop="def", max_tokens=400)
    assert reply.json()["choices"][0]["text"] == "abc"
    assert reply.json()["usage"]["completion_tokens"] == 6
    server.wait_event("abort", server.engine_ids(prompt))


def test_text_held_back_for_a_stop_string_comes_out_when_it_does_not_match(server: RunningServer):
    for text, stop in [("Alice! Hi", "Alice:"), ("?\n", "\n\n"), ("tell Ali", "Alice:")]:
        events = raw_events(server, "/v1/chat/completions", {"messages": ask(text), "stop": stop})
        joined = "".join(event["choices"][0]["delta"]["content"] for event in events[:-1])
        assert joined == text


def test_output_that_ends_inside_a_character_is_the_same_in_both_modes(server: RunningServer):
    body = {"prompt": script(say="ab🌶"), "max_tokens": 4}
    whole = server.post("/v1/completions", body).json()["choices"][0]
    events = raw_events(server, "/v1/completions", body)[:-1]
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    assert whole["text"].startswith("ab")
    assert whole["finish_reason"] == "length"


def test_every_choice_of_n_has_its_own_role_text_and_end(server: RunningServer):
    events = raw_events(server, "/v1/chat/completions", {"messages": ask(SAID), "n": 3})[:-1]
    for index in range(3):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"]["content"] for choice in own) == SAID
        assert own[-1]["finish_reason"] == "stop"


def test_choices_of_one_prompt_draw_with_different_seeds(server: RunningServer):
    before = len(server.events("add"))
    reply = server.complete([script(say="a"), script(say="b")], n=2, seed=7)
    assert [c["text"] for c in reply.json()["choices"]] == ["a", "a", "b", "b"]
    assert [c["index"] for c in reply.json()["choices"]] == [0, 1, 2, 3]
    seeds = [event["params"]["seed"] for event in server.events("add")[before:]]
    assert seeds == [7, 8, 7, 8]


def test_an_engine_error_before_the_first_token_is_a_500_even_in_a_stream(server: RunningServer):
    reply = server.complete(script(error=0), stream=True)
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "NaN in the logits"


def test_an_engine_error_in_mid_stream_is_an_error_event_before_done(server: RunningServer):
    events = raw_events(
        server, "/v1/completions", {"prompt": script(say=SAID, error=5, delay=0.02)}
    )
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["message"] == "NaN in the logits"
    assert events[-2]["error"]["code"] == 500
    assert events[0]["choices"][0]["text"] == "a"


def test_what_came_with_an_error_is_sent_before_it(server: RunningServer):
    prompt = script(say=SAID, error=5, wait=0.5, tag="at once")
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(raw_events, server, "/v1/completions", {"prompt": prompt})
        # Stopped, the server finds tokens and error waiting when it goes on.
        ids = server.engine_ids(prompt)
        server.process.send_signal(signal.SIGSTOP)
        try:
            server.wait_event("error", ids)
        finally:
            server.process.send_signal(signal.SIGCONT)
        *told, error, done = reply.result()
    assert done == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in told) == SAID[:5]
    assert error["error"]["message"] == "NaN in the logits"


def test_a_stop_token_ends_the_text_without_being_shown(server: RunningServer):
    stop_id = server.post("/tokenize", {"prompt": "g"}).json()["tokens"][0]
    choice = server.complete("x", stop_token_ids=[stop_id], max_tokens=99).json()["choices"][0]
    assert choice["text"] == "abcdef"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop_id)


def test_ignore_eos_runs_to_max_tokens(server: RunningServer):
    reply = server.complete(script(say="ab"), ignore_eos=True, max_tokens=10).json()
    assert reply["usage"]["completion_tokens"] == 10
    assert reply["choices"][0]["finish_reason"] == "length"
    shown = server.complete(
        script(say="ab"), ignore_eos=True, max_tokens=4, skip_special_tokens=False
    )
    assert shown.json()["choices"][0]["text"] == "ab<|im_end|>a"
