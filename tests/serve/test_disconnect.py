"""A client that goes away frees what its request held, in every state of the request."""

from __future__ import annotations

import time
from pathlib import Path

import openai
import pytest

from tests.serve.running_server import RunningServer, script, sent, serving, wait_for


def num_in_engine(server: RunningServer) -> float:
    on = [server.metric("num_requests_running", placement=place) for place in ("device", "host")]
    return sum(on) + server.metric("num_requests_waiting")


def hang_up(server: RunningServer, body: dict[str, object], after_s: float) -> None:
    """Send a request and close the connection without reading the answer."""
    with sent(server, body):
        time.sleep(after_s)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_client_that_hangs_up_frees_its_requests(
    server: RunningServer, stream: bool, num_choices: int
):
    aborts = len(server.events("abort"))
    counted = server.metric("request_success_total", finished_reason="abort")
    body = {"prompt": script(delay=0.02), "max_tokens": 400, "stream": stream, "n": num_choices}
    hang_up(server, body, 0.2)
    wait_for(lambda: len(server.events("abort")) == aborts + num_choices, "no abort")
    wait_for(lambda: num_in_engine(server) == 0, "the engine still has the request")
    total = counted + num_choices
    assert server.metric("request_success_total", finished_reason="abort") == total


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_before_the_first_token_frees_its_request(
    server: RunningServer, stream: bool
):
    aborts = len(server.events("abort"))
    hang_up(server, {"prompt": script(wait=30), "stream": stream}, 0.2)
    wait_for(lambda: len(server.events("abort")) == aborts + 1, "no abort")


def test_a_client_that_leaves_in_mid_stream_frees_its_request(
    server: RunningServer, client: openai.OpenAI
):
    aborts = len(server.events("abort"))
    stream = client.completions.create(
        model="tiny", prompt=script(delay=0.01), max_tokens=400, stream=True
    )
    for _, _chunk in zip(range(5), stream, strict=False):
        pass
    stream.close()
    wait_for(lambda: len(server.events("abort")) == aborts + 1, "no abort")


def test_a_storm_of_hang_ups_while_running_and_queued_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path
):
    with serving(tiny_checkpoint, tmp_path, "--max-num-seqs", "4") as server:
        body: dict[str, object] = {"prompt": script(delay=0.02), "max_tokens": 400}
        sockets = [sent(server, body) for _ in range(64)]
        wait_for(lambda: len(server.events("add")) == 64, "not all arrived")
        time.sleep(0.2)
        assert server.metric("num_requests_waiting") == 60
        for sock in sockets:
            sock.close()
        wait_for(lambda: num_in_engine(server) == 0, "requests are left in the engine")
        assert len(server.events("abort")) == 64
        assert server.metric("request_success_total", finished_reason="abort") == 64
        assert server.is_alive()
