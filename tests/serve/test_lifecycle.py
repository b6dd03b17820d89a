"""Start, overload, engine death and shutdown of the server process."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.serve.running_server import (
    TLS,
    RunningServer,
    is_running,
    script,
    sent,
    serving,
    start_fake,
    wait_for,
)


def stream_lines(server: RunningServer, body: dict[str, object], lines: list[str]) -> None:
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={**body, "stream": True}, timeout=60
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
    loaded = tmp_path / "loaded"
    server = start_fake(tiny_checkpoint, tmp_path, fake=("--ready-when", str(loaded)))
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
        loaded.touch()
        assert server.wait_ready().is_alive()
        hint = f"curl {server.url}/v1/chat/completions"
        wait_for(lambda: hint in server.stderr, "no hint")
    finally:
        assert server.stop() == 0


def test_a_signal_while_loading_ends_the_server_at_once(tiny_checkpoint: Path, tmp_path: Path):
    never = tmp_path / "never"
    server = start_fake(tiny_checkpoint, tmp_path, fake=("--ready-when", str(never)))
    wait_for(lambda: server.events("start"), "no engine")
    assert server.stop() == 0
    assert not is_running(engine_pid(server))


def test_a_taken_port_is_an_error_that_says_what_to_do(server: RunningServer):
    port = server.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "neojax.serve", "--port", port]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
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
    go = tmp_path / "go"
    with serving(tiny_checkpoint, tmp_path, "--max-num-queued-reqs", "2") as server:
        first, _ = start_stream(server, prompt=script(until=str(go)), max_tokens=3)
        second, _ = start_stream(server, prompt=script(until=str(go)), max_tokens=3)
        refused = server.complete("a", stream=True)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert "--max-num-queued-reqs" in refused.json()["error"]["message"]
        assert server.metric("admission_rejections_total", reason="queue_full") == 1
        go.touch()
        first.join()
        second.join()
        assert server.is_alive()
        never = server.complete(["a"] * 1000, n=128)
        assert never.status_code == 400
        assert "128000 choices" in never.json()["error"]["message"]


def test_requests_that_arrive_together_do_not_overshoot_the_queue_limit(
    tiny_checkpoint: Path, tmp_path: Path
):
    go = tmp_path / "go"
    with serving(tiny_checkpoint, tmp_path, "--max-num-queued-reqs", "3") as server:
        address = httpx.URL(server.url)
        raw = json.dumps({"prompt": script(until=str(go)), "max_tokens": 2}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        request = f"{head}Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
        sockets = [socket.create_connection((address.host, address.port)) for _ in range(24)]
        # Stopped, the server finds all of them waiting when it goes on.
        server.process.send_signal(signal.SIGSTOP)
        for sock in sockets:
            sock.sendall(request)
        server.process.send_signal(signal.SIGCONT)
        refused = 24 - 3
        wait_for(
            lambda: len(select.select(sockets, [], [], 0)[0]) == refused, "not so many refused"
        )
        go.touch()
        statuses = []
        for sock in sockets:
            with sock:
                statuses.append(sock.recv(65536).split()[1])
        assert sorted(statuses) == [b"200"] * 3 + [b"503"] * refused
        assert len(server.events("add")) == 3


def test_headers_that_drip_in_are_not_waited_for_and_others_are_served_meanwhile(
    tiny_checkpoint: Path, tmp_path: Path
):
    with serving(tiny_checkpoint, tmp_path, fake=("--header-timeout-s", "1.5")) as server:
        address = httpx.URL(server.url)
        sockets = [socket.create_connection((address.host, address.port)) for _ in range(200)]
        num_served = 0

        def are_closed() -> bool:
            """Whether the server has ended them all; those that it has not get another byte."""
            nonlocal num_served
            for sock in list(sockets):
                try:
                    sock.sendall(b"X")
                    is_closed = bool(select.select([sock], [], [], 0)[0]) and sock.recv(1) == b""
                except (ConnectionResetError, BrokenPipeError):
                    is_closed = True
                if is_closed:
                    sock.close()
                    sockets.remove(sock)
            assert server.complete("a", max_tokens=2).status_code == 200
            num_served += 1
            return not sockets

        for sock in sockets:
            sock.sendall(b"GET /v1/models HTTP/1.1\r\n")
        wait_for(are_closed, "the server waits for ever")
        assert num_served > 1
        assert server.is_alive()


def test_a_connection_that_is_used_again_outlives_the_time_for_headers(
    tiny_checkpoint: Path, tmp_path: Path
):
    def ask_twice(server: RunningServer, stream: bool) -> list[int]:
        """Both the answers and the pauses take longer than that time."""
        body = {"prompt": script(delay=0.12), "max_tokens": 10, "stream": stream}
        statuses = []
        with httpx.Client(base_url=server.url, timeout=60, verify=TLS) as client:
            for _ in range(2):
                statuses.append(client.post("/v1/completions", json=body).status_code)
                time.sleep(1.2)
        return statuses

    with (
        serving(tiny_checkpoint, tmp_path, fake=("--header-timeout-s", "1.0")) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        for statuses in pool.map(functools.partial(ask_twice, server), (False, True)):
            assert statuses == [200, 200]
        assert [line for line in server.lines if "rror" in line] == []


def test_a_request_that_takes_too_long_ends_with_a_timeout_and_is_aborted(
    tiny_checkpoint: Path, tmp_path: Path
):
    never = str(tmp_path / "never")
    with (
        serving(tiny_checkpoint, tmp_path, "--request-timeout", "2") as server,
        ThreadPoolExecutor(4) as pool,
    ):
        begun = [pool.submit(server.complete, script(until=never), stream=s) for s in (False, True)]
        unbegun = [pool.submit(server.complete, script(wait=90), stream=s) for s in (False, True)]
        for future in (begun[0], *unbegun):
            assert future.result().status_code == 504
            assert "--request-timeout" in future.result().json()["error"]["message"]
        stream = begun[1].result()
        assert stream.status_code == 200
        error = json.loads(stream.text.split("\n\n")[-3].removeprefix("data: "))["error"]
        assert error["code"] == 504
        assert server.is_alive()
        wait_for(lambda: len(server.events("abort")) == 4, "not all aborted")


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
def test_engine_death_gives_errors_and_then_a_non_zero_exit(
    tiny_checkpoint: Path, tmp_path: Path, death: str
):
    never = str(tmp_path / "never")
    with serving(tiny_checkpoint, tmp_path) as server:
        bystander, lines = start_stream(server, prompt=script(until=never))
        if death == "kill":
            os.kill(engine_pid(server), signal.SIGKILL)
        else:
            how = {"die": 3} if death == "exit" else {"fail": 3}
            assert server.complete(script(**how)).status_code in (500, 503)
        bystander.join(60)
        assert lines[-1] == "data: [DONE]"
        message = json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
        assert message.startswith("the engine ")
        assert server.wait() == 1
        assert not is_running(engine_pid(server))
        expected = {"exit": "exit code 9", "failed": "fell off the bus", "kill": "SIGKILL"}
        assert expected[death] in server.stderr


def test_probes_are_told_that_the_engine_died_until_the_server_ends(
    tiny_checkpoint: Path, tmp_path: Path
):
    with serving(tiny_checkpoint, tmp_path, fake=("--last-words-s", "300")) as server:
        os.kill(engine_pid(server), signal.SIGKILL)
        reply = wait_for(
            lambda: (r := server.get("/health")).status_code == 503 and r, "still green"
        )
        assert "SIGKILL" in reply.json()["error"]["message"]
        assert server.complete("a").status_code == 503
        assert server.stop() == 1  # a signal cuts the last words short


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
        thread.join(60)
        assert server.is_alive()


def test_sigterm_lets_streams_finish_and_refuses_new_requests(
    tiny_checkpoint: Path, tmp_path: Path
):
    go = tmp_path / "go"
    with serving(tiny_checkpoint, tmp_path) as server:
        running, lines = start_stream(server, prompt=script(until=str(go)), max_tokens=5)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/health").status_code == 503, "still green")
        refused = server.complete("a")
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        go.touch()
        running.join(60)
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert not is_running(engine_pid(server))


def test_requests_that_outlive_the_shutdown_timeout_end_with_an_error(
    tiny_checkpoint: Path, tmp_path: Path
):
    never = str(tmp_path / "never")
    with serving(tiny_checkpoint, tmp_path, "--shutdown-timeout", "0.3") as server:
        running, lines = start_stream(server, prompt=script(until=never))
        assert server.stop() == 0
        running.join(60)
        assert lines[-1] == "data: [DONE]"
        assert "shutting down" in json.loads(lines[-2][6:])["error"]["message"]
        assert not is_running(engine_pid(server))


def test_a_second_signal_ends_the_server_at_once(tiny_checkpoint: Path, tmp_path: Path):
    never = str(tmp_path / "never")
    with serving(tiny_checkpoint, tmp_path, "--shutdown-timeout", "300") as server:
        pid = engine_pid(server)
        with sent(server, {"prompt": script(until=never), "stream": True}) as sock:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
            server.process.send_signal(signal.SIGINT)
            wait_for(lambda: server.get("/health").status_code == 503, "not draining")
            assert server.stop(signal.SIGINT) == 128 + signal.SIGINT
        wait_for(lambda: not is_running(pid), "the engine lives on")


def test_killing_the_server_leaves_no_engine(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path) as server:
        pid = engine_pid(server)
        server.stop(signal.SIGKILL)
        wait_for(lambda: not is_running(pid), "the engine lives on")
