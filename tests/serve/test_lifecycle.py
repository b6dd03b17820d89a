"""Start, overload, engine death and shutdown of the server process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.serve.running_server import (
    RunningServer,
    is_running,
    script,
    serving,
    start_fake,
    wait_for,
)


def stream_lines(server: RunningServer, body: dict[str, object], lines: list[str]) -> None:
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={**body, "stream": True}, timeout=30
    ) as reply:
        lines += [f"status {reply.status_code}"]
        for line in reply.iter_lines():
            if line:
                lines.append(line)


def start_stream(server: RunningServer, **body: object) -> tuple[threading.Thread, list[str]]:
    """A stream read in a thread; returns once the first event has come."""
    lines: list[str] = []
    thread = threading.Thread(target=stream_lines, args=(server, body, lines), daemon=True)
    thread.start()
    wait_for(lambda: len(lines) > 1, "the stream did not start")
    return thread, lines


def engine_pid(server: RunningServer) -> int:
    return server.events("start")[0]["pid"]


def test_the_server_listens_before_the_model_is_loaded(tiny_checkpoint: Path, tmp_path: Path):
    server = start_fake(tiny_checkpoint, tmp_path, fake=("--ready-delay", "1.0"))
    try:
        reply = server.get("/health")
        assert reply.status_code == 503
        assert "loading" in reply.json()["error"]["message"]
        refused = server.complete("a")
        assert refused.status_code == 503
        assert server.get("/ready").status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert server.get("/v1/models").status_code == 200
        assert server.get("/metrics").status_code == 200
        assert server.wait_ready().is_alive()
        assert f"curl {server.url}/v1/chat/completions" in server.stderr
    finally:
        assert server.stop() == 0


def test_a_signal_while_loading_ends_the_server_at_once(tiny_checkpoint: Path, tmp_path: Path):
    server = start_fake(tiny_checkpoint, tmp_path, fake=("--ready-delay", "60"))
    time.sleep(0.3)
    start_s = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - start_s < 30  # not the 60 s of loading


def test_a_taken_port_is_an_error_that_says_what_to_do(server: RunningServer):
    port = server.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "neojax.serve", "--port", port]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert f"port {port}" in ended.stderr
    assert "--port 0" in ended.stderr


def test_an_engine_that_cannot_start_ends_the_server_with_its_message(
    tiny_checkpoint: Path, tmp_path: Path
):
    server = start_fake(tiny_checkpoint, tmp_path, fake=("--fail-start",))
    assert server.wait() == 1
    assert "no memory left: 3 GiB asked, 1 GiB there" in server.stderr


def test_a_model_that_does_not_exist_ends_the_server_with_a_reason(tmp_path: Path):
    server = start_fake(tmp_path / "no-such-model", tmp_path)
    assert server.wait() == 1
    assert "cannot be loaded" in server.stderr
    assert "Traceback" not in server.stderr


def test_the_engine_gets_its_settings_and_the_share_of_memory(
    tiny_checkpoint: Path, tmp_path: Path
):
    flags = ("--gpu-memory-utilization", "0.5", "--max-num-seqs", "3", "--cpu-kv-gib", "2")
    with serving(tiny_checkpoint, tmp_path, *flags) as server:
        start = server.events("start")[0]
        assert start["env"]["XLA_CLIENT_MEM_FRACTION"] == "0.5"
        assert start["config"]["max_num_seqs"] == 3
        assert start["config"]["cpu_kv_gib"] == 2.0
        assert "port" not in start["config"]


def test_requests_beyond_the_queue_limit_get_503_and_retry_after(
    tiny_checkpoint: Path, tmp_path: Path
):
    with serving(tiny_checkpoint, tmp_path, "--max-num-queued-reqs", "2") as server:
        first, _ = start_stream(server, prompt=script(delay=0.02), max_tokens=40)
        second, _ = start_stream(server, prompt=script(delay=0.02), max_tokens=40)
        refused = server.complete("a", stream=True)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert "--max-num-queued-reqs" in refused.json()["error"]["message"]
        assert server.metric("admission_rejections_total", reason="queue_full") == 1
        first.join()
        second.join()
        assert server.is_alive()
        never = server.complete(["a"] * 1000, n=128)
        assert never.status_code == 400
        assert "128000 choices" in never.json()["error"]["message"]


def test_requests_that_arrive_together_do_not_overshoot_the_queue_limit(
    tiny_checkpoint: Path, tmp_path: Path
):
    with serving(tiny_checkpoint, tmp_path, "--max-num-queued-reqs", "3") as server:
        address = httpx.URL(server.url)
        raw = json.dumps({"prompt": script(wait=1.0), "max_tokens": 1}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        request = f"{head}Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
        sockets = [socket.create_connection((address.host, address.port)) for _ in range(24)]
        # Stopped, the server finds all of them waiting when it goes on.
        server.process.send_signal(signal.SIGSTOP)
        for sock in sockets:
            sock.sendall(request)
        server.process.send_signal(signal.SIGCONT)
        statuses = []
        for sock in sockets:
            with sock:
                statuses.append(sock.recv(65536).split()[1])
        assert sorted(statuses) == [b"200"] * 3 + [b"503"] * 21
        assert len(server.events("add")) == 3


def test_headers_that_drip_in_are_not_waited_for_and_others_are_served_meanwhile(
    tiny_checkpoint: Path, tmp_path: Path
):
    with serving(tiny_checkpoint, tmp_path, fake=("--header-timeout-s", "0.6")) as server:
        address = httpx.URL(server.url)
        sockets = [socket.create_connection((address.host, address.port)) for _ in range(200)]
        closed = 0
        start_s = time.monotonic()
        for sock in sockets:
            sock.sendall(b"GET /v1/models HTTP/1.1\r\n")
        while time.monotonic() < start_s + 0.4:
            for sock in sockets:
                sock.sendall(b"X")
            assert server.complete("a", max_tokens=2).status_code == 200
        for sock in sockets:
            sock.settimeout(3)
            try:
                closed += sock.recv(1) == b""
            except ConnectionResetError:
                closed += 1
            sock.close()
        assert closed == 200
        assert server.is_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_is_used_again_outlives_the_time_for_headers(
    tiny_checkpoint: Path, tmp_path: Path, stream: bool
):
    with (
        serving(tiny_checkpoint, tmp_path, fake=("--header-timeout-s", "0.3")) as server,
        httpx.Client(base_url=server.url, timeout=10) as client,
    ):
        for _ in range(2):
            body = {"prompt": script(delay=0.05), "max_tokens": 10, "stream": stream}
            assert client.post("/v1/completions", json=body).status_code == 200
            time.sleep(0.4)
        assert len(server.lines) == len([line for line in server.lines if "rror" not in line])


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_with_a_timeout_and_is_aborted(
    tiny_checkpoint: Path, tmp_path: Path, stream: bool
):
    with serving(tiny_checkpoint, tmp_path, "--request-timeout", "0.4") as server:
        before_first = server.complete(script(wait=30), stream=stream)
        assert before_first.status_code == 504
        assert "--request-timeout" in before_first.json()["error"]["message"]
        running = server.complete(script(delay=0.02), max_tokens=400, stream=stream)
        if stream:
            error = json.loads(running.text.split("\n\n")[-3].removeprefix("data: "))["error"]
            assert error["code"] == 504
        else:
            assert running.status_code == 504
        assert server.is_alive()
        assert len(server.events("abort")) == 2


@pytest.mark.parametrize("by_env", [False, True])
def test_an_api_key_is_needed_everywhere_but_at_the_probes(
    tiny_checkpoint: Path, tmp_path: Path, by_env: bool, monkeypatch: pytest.MonkeyPatch
):
    if by_env:
        monkeypatch.setattr(
            "tests.serve.running_server._env", lambda: {**os.environ, "NEOJAX_API_KEY": "s3cret"}
        )
    flags = () if by_env else ("--api-key", "other, s3cret")
    with serving(tiny_checkpoint, tmp_path, *flags) as server:
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert server.get(path).status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            for path in ("/v1/models", "/openapi.json"):
                reply = server.get(path, headers=headers)
                assert reply.status_code == 401
                assert reply.json()["error"]["type"] == "AuthenticationError"
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret") as client:
            assert client.completions.create(model="tiny", prompt="a").choices[0].text
        assert "s3cret" not in server.stderr


@pytest.mark.parametrize("death", ["exit", "failed", "kill"])
def test_engine_death_gives_errors_then_503_then_a_non_zero_exit(
    tiny_checkpoint: Path, tmp_path: Path, death: str
):
    with serving(tiny_checkpoint, tmp_path) as server:
        bystander, lines = start_stream(server, prompt=script(delay=0.02), max_tokens=400)
        if death == "kill":
            os.kill(engine_pid(server), signal.SIGKILL)
        else:
            how = {"die": 3} if death == "exit" else {"fail": 3}
            assert server.complete(script(**how)).status_code in (500, 503)
        bystander.join(5)
        assert lines[-1] == "data: [DONE]"
        message = json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
        assert message.startswith("the engine ")
        assert server.get("/health").status_code == 503
        assert server.complete("a").status_code == 503
        assert server.wait() == 1
        assert not is_running(engine_pid(server))
        expected = {"exit": "exit code 9", "failed": "fell off the bus", "kill": "SIGKILL"}
        assert expected[death] in server.stderr


def test_health_turns_red_while_the_engine_is_stuck_with_requests(
    tiny_checkpoint: Path, tmp_path: Path
):
    with serving(tiny_checkpoint, tmp_path, fake=("--stall-s", "0.5")) as server:
        time.sleep(0.7)
        assert server.get("/health").status_code == 200  # idle is not stuck
        os.kill(engine_pid(server), signal.SIGSTOP)
        thread = threading.Thread(target=server.complete, daemon=True)
        thread.start()
        reply = wait_for(
            lambda: (r := server.get("/health")).status_code == 503 and r, "still green"
        )
        assert "finished no step" in reply.json()["error"]["message"]
        os.kill(engine_pid(server), signal.SIGCONT)
        thread.join(5)
        assert server.is_alive()


def test_sigterm_lets_streams_finish_and_refuses_new_requests(
    tiny_checkpoint: Path, tmp_path: Path
):
    with serving(tiny_checkpoint, tmp_path) as server:
        running, lines = start_stream(server, prompt=script(delay=0.02), max_tokens=50)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/health").status_code == 503, "still green")
        refused = server.complete("a")
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        running.join(10)
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert not is_running(engine_pid(server))


def test_requests_that_outlive_the_shutdown_timeout_end_with_an_error(
    tiny_checkpoint: Path, tmp_path: Path
):
    with serving(tiny_checkpoint, tmp_path, "--shutdown-timeout", "0.3") as server:
        running, lines = start_stream(server, prompt=script(delay=0.05), max_tokens=400)
        assert server.stop() == 0
        running.join(5)
        assert lines[-1] == "data: [DONE]"
        assert "shutting down" in json.loads(lines[-2][6:])["error"]["message"]
        assert not is_running(engine_pid(server))


def test_a_second_signal_ends_the_server_at_once(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path) as server:
        pid = engine_pid(server)
        body = {"prompt": script(delay=0.1), "max_tokens": 400, "stream": True}
        address = httpx.URL(server.url)
        raw = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection((address.host, address.port)) as sock:
            sock.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
            server.process.send_signal(signal.SIGINT)
            wait_for(lambda: server.get("/health").status_code == 503, "not draining")
            start_s = time.monotonic()
            assert server.stop(signal.SIGINT) == 128 + signal.SIGINT
            assert time.monotonic() - start_s < 20  # not the 40 s of the stream
        wait_for(lambda: not is_running(pid), "the engine lives on")


def test_killing_the_server_leaves_no_engine(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path) as server:
        pid = engine_pid(server)
        server.stop(signal.SIGKILL)
        wait_for(lambda: not is_running(pid), "the engine lives on")
