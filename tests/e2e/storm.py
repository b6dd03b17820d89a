"""Hundreds of streams whose clients are killed at random, and what is left of them.

    python -m tests.e2e.storm --streams 500 --seconds 120

Starts the server over the default model, measures a quiet load, lets client processes of many
streams each be killed with SIGKILL and replaced, waits until queue and pools are empty, and
measures the quiet load again. The exit code is 1 when something is left or a quiet request failed.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx

from tests.serve.running_server import RunningServer, wait_for

FLAGS = ("--max-model-len", "256", "--max-num-seqs", "32", "--max-num-batched-tokens", "256")
READY_TIMEOUT_S = 600
STREAMS_PER_CLIENT = 25
# Reads without looking: what it costs is the server's share of these cores.
CLIENT = """
import json, random, select, socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def ask():
    body = {"prompt": [random.randrange(1000, 9000) for _ in range(random.randrange(4, 64))],
            "max_tokens": random.randrange(8, 128), "ignore_eos": True, "stream": True}
    raw = json.dumps(body).encode()
    sock = socket.create_connection((host, port))
    head = (b"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n"
            b"Content-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(raw))
    sock.sendall(head + raw)
    return sock
socks = [ask() for _ in range(count)]
while True:
    for sock in select.select(socks, [], [])[0]:
        if not sock.recv(65536):
            sock.close()
            socks[socks.index(sock)] = ask()
"""


class Latency(NamedTuple):
    """Of the quiet load, in milliseconds."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float


class Result(NamedTuple):
    """What a storm left, and what it did."""

    before: Latency
    after: Latency
    num_killed: int  # client processes
    num_aborted: float  # requests
    most_waiting: float
    empty_after_s: float


def quiet_load(url: str, num_requests: int, concurrency: int = 2) -> Latency:
    """Latencies of streams of 32 tokens in and 24 out; an error of any raises."""

    def ask(number: int) -> tuple[float, float]:
        prompt = [1000 + (number * 37 + i) % 5000 for i in range(32)]
        body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "stream": True}
        start_s = time.monotonic()
        times = []
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=120) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    assert "error" not in json.loads(line[6:])
                    times.append(time.monotonic())
        return 1000 * (times[0] - start_s), 1000 * (times[-1] - times[0]) / 23

    with ThreadPoolExecutor(concurrency) as pool:
        ttft, tpot = zip(*pool.map(ask, range(num_requests)), strict=True)
    return Latency(statistics.median(ttft), _p99(ttft), statistics.median(tpot), _p99(tpot))


def _p99(values: tuple[float, ...]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def num_left(server: RunningServer) -> float:
    """Requests in the engine, and the used shares of the pools."""
    pools = [server.metric("kv_cache_usage_perc", pool=pool) for pool in ("device", "host")]
    running = [server.metric("num_requests_running", placement=p) for p in ("device", "host")]
    return sum(running) + server.metric("num_requests_waiting") + sum(pools)


def storm(server: RunningServer, num_streams: int, seconds: float, num_probes: int) -> Result:
    """Quiet load, storm, emptiness, quiet load."""
    rng = random.Random(0)
    quiet_load(server.url, 4)
    before = quiet_load(server.url, num_probes)
    url = httpx.URL(server.url)
    command = [sys.executable, "-S", "-c", CLIENT, url.host, str(url.port)]

    def client(count: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, str(count)])

    counts = [STREAMS_PER_CLIENT] * (num_streams // STREAMS_PER_CLIENT)
    clients = [client(count) for count in counts]
    num_killed, most_waiting = 0, 0.0
    deadline_s = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline_s:
            time.sleep(rng.uniform(0.1, 1.0))
            victim = rng.randrange(len(clients))
            clients[victim].send_signal(signal.SIGKILL)
            clients[victim].wait()
            num_killed += 1
            clients[victim] = client(counts[victim])
            most_waiting = max(most_waiting, server.metric("num_requests_waiting"))
    finally:
        for each in clients:
            each.kill()
        for each in clients:
            each.wait()
    end_s = time.monotonic()
    wait_for(lambda: num_left(server) == 0, "requests or blocks are left", 30)
    empty_after_s = time.monotonic() - end_s
    aborted = server.metric("request_success_total", finished_reason="abort")
    after = quiet_load(server.url, num_probes)
    return Result(before, after, num_killed, aborted, most_waiting, empty_after_s)


def main() -> int:
    """The command; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--probes", type=int, default=100, help="requests of each quiet load")
    arguments = parser.parse_args()
    server = RunningServer([sys.executable, "-m", "neojax.serve", *FLAGS])
    try:
        server.wait_ready(READY_TIMEOUT_S)
        result = storm(server, arguments.streams, arguments.seconds, arguments.probes)
        code = server.stop(timeout_s=60)
    finally:
        server.kill()
    for name, latency in (("before", result.before), ("after", result.after)):
        shown = ", ".join(f"{field} {value:.1f}" for field, value in latency._asdict().items())
        print(f"{name}: {shown} ms")
    print(
        f"{result.num_killed} client processes killed, {result.num_aborted:.0f} requests aborted, "
        f"at most {result.most_waiting:.0f} waiting, empty {result.empty_after_s:.2f} s after "
        f"the last kill; the server ended with code {code}"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
