"""A client that goes away frees what its request held, in every state of the request."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.serve.running_server import RunningServer, script, sent, serving, wait_for


def num_in_engine(server: RunningServer) -> float:
    on = [server.metric("num_requests_running", placement=place) for place in ("device", "host")]
    return sum(on) + server.metric("num_requests_waiting")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_client_that_hangs_up_frees_its_requests(
    server: RunningServer, stream: bool, num_choices: int
):
    counted = server.metric("request_success_total", finished_reason="abort")
    prompt = script(until="/never", tag=f"running {stream} {num_choices}")
    with sent(server, {"prompt": prompt, "stream": stream, "n": num_choices}):
        ids = server.engine_ids(prompt, num_choices)
        server.wait_event("first", ids)
        wait_for(lambda: num_in_engine(server) == num_choices, "not in the statistics")
    server.wait_event("abort", ids)
    wait_for(lambda: num_in_engine(server) == 0, "the engine still has the request")
    total = counted + num_choices
    assert server.metric("request_success_total", finished_reason="abort") == total


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_before_the_first_token_frees_its_request(
    server: RunningServer, stream: bool
):
    prompt = script(wait=300, tag=f"waiting {stream}")
    with sent(server, {"prompt": prompt, "stream": stream}):
        ids = server.engine_ids(prompt)
    server.wait_event("abort", ids)


def test_a_client_that_leaves_in_mid_stream_frees_its_request(
    server: RunningServer, client: openai.OpenAI
):
    prompt = script(until="/never", tag="in mid-stream")
    stream = client.completions.create(model="tiny", prompt=prompt, stream=True)
    next(iter(stream))
    stream.close()
    server.wait_event("abort", server.engine_ids(prompt))


def test_a_storm_of_hang_ups_while_running_and_queued_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path
):
    with serving(tiny_checkpoint, tmp_path, "--max-num-seqs", "4") as server:
        body: dict[str, object] = {"prompt": script(until="/never")}
        sockets = [sent(server, body) for _ in range(64)]
        wait_for(lambda: len(server.events("add")) == 64, "not all arrived")
        wait_for(lambda: server.metric("num_requests_waiting") == 60, "not so many wait")
        for sock in sockets:
            sock.close()
        wait_for(lambda: num_in_engine(server) == 0, "requests are left in the engine")
        assert len(server.events("abort")) == 64
        assert server.metric("request_success_total", finished_reason="abort") == 64
        assert server.is_alive()
