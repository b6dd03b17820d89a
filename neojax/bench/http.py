"""`python -m neojax.bench http`: what the HTTP process costs, with an engine that costs nothing.

The real server and tokenizer, the engine of `null_engine`, and clients that read bytes without
looking at them. All of them share this machine's cores.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from neojax.cli import parse
from neojax.config import DEFAULT_MODEL

PROG = "python -m neojax.bench http"

_PROMPT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the "
    "age of foolishness, it was the epoch of belief, it was the epoch of incredulity, "
)
_READY_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """The workload of the clients."""

    model: str = DEFAULT_MODEL
    """Whose tokenizer and chat template are used."""
    concurrency: str = "1,64,256"
    """Requests kept running at the same time: a list such as 1,64, one measurement each."""
    output_len: int = 128
    """Tokens generated for each request."""
    duration_s: float = 5.0
    """Seconds of each run."""
    repeats: int = 3
    """Runs of each measurement; the median is reported."""
    step_ms: float = 0.0
    """Milliseconds of an engine step, which gives a token to every request; 0: no pause at all."""
    output: Path | None = None
    """Write the results as JSON to this file."""


class Load(NamedTuple):
    """What the clients saw in one run."""

    requests_per_s: float
    tokens_per_s: float
    ttft_ms: float  # median over requests
    num_failed: int


@dataclasses.dataclass(slots=True)
class _Count:
    num_requests: int = 0
    num_failed: int = 0
    ttft_ms: list[float] = dataclasses.field(default_factory=list)


class _Client(asyncio.Protocol):
    """Sends one request after the other on one connection until `deadline_s`."""

    def __init__(self, request: bytes, end: bytes, deadline_s: float, count: _Count) -> None:
        self._request = request
        self._end = end
        self._deadline_s = deadline_s
        self._count = count
        self._tail = b""
        self._is_first = True
        self._sent_s = 0.0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        if self._is_first:
            self._is_first = False
            self._count.ttft_ms.append(1000 * (time.monotonic() - self._sent_s))
            if not data.startswith(b"HTTP/1.1 200"):
                self._count.num_failed += 1
                self._transport.close()
                return
        self._tail = (self._tail + data)[-len(self._end) :]
        if self._tail == self._end:
            self._count.num_requests += 1
            if time.monotonic() < self._deadline_s:
                self._send()
            else:
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_result(None)

    def _send(self) -> None:
        self._tail, self._is_first, self._sent_s = b"", True, time.monotonic()
        self._transport.write(self._request)


def main(argv: list[str] | None = None) -> int:
    """Measures streams and whole answers at each concurrency; the exit code."""
    config = parse(sys.argv[1:] if argv is None else argv, HttpConfig, prog=PROG)
    directory = tempfile.TemporaryDirectory(prefix="neojax-bench-")
    server, port = _start_server(config, Path(directory.name) / "server.log")
    rows: list[dict[str, object]] = []
    try:
        print(f"{'':12}{'concurrency':>12}{'requests/s':>12}{'tokens/s':>12}{'TTFT ms':>10}")
        for kind in ("stream", "whole"):
            for concurrency in map(int, config.concurrency.split(",")):
                loads = [_measure(config, port, kind, concurrency) for _ in range(config.repeats)]
                median = Load(*(statistics.median(values) for values in zip(*loads, strict=True)))
                rows.append({"answer": kind, "concurrency": concurrency, **median._asdict()})
                print(
                    f"{kind:12}{concurrency:12}{median.requests_per_s:12.0f}"
                    f"{median.tokens_per_s:12.0f}{median.ttft_ms:10.1f}"
                    + (f"  {median.num_failed:.0f} failed" if median.num_failed else "")
                )
    finally:
        server.terminate()
        server.wait(30)
        directory.cleanup()
    if config.output is not None:
        config.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


def _start_server(config: HttpConfig, log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A ready server over the null engine, and its port."""
    command = [sys.executable, "-m", "neojax.bench.null_server", str(config.step_ms / 1000)]
    command += [config.model, "--port", "0", "--max-num-queued-reqs", "100000"]
    with log.open("wb") as stderr:
        server = subprocess.Popen(command, stderr=stderr)
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s and server.poll() is None:
        text = log.read_text(encoding="utf-8")
        if " ready in " in text:
            found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", text)
            assert found is not None
            return server, int(found[1])
        time.sleep(0.05)
    server.kill()
    raise RuntimeError(f"the server did not get ready:\n{log.read_text(encoding='utf-8')}")


def _measure(config: HttpConfig, port: int, kind: str, concurrency: int) -> Load:
    return asyncio.run(_run(config, port, kind, concurrency))


async def _run(config: HttpConfig, port: int, kind: str, concurrency: int) -> Load:
    """So many clients, each with a connection of its own, for the duration and to their end."""
    body = {"prompt": _PROMPT, "max_tokens": config.output_len, "stream": kind == "stream"}
    raw = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw
    end = b"data: [DONE]\n\n\r\n0\r\n\r\n" if kind == "stream" else b'"text_completion"}'
    count, start_s = _Count(), time.monotonic()
    clients: list[_Client] = []
    for _ in range(concurrency):
        _, client = await asyncio.get_running_loop().create_connection(
            lambda: _Client(request, end, start_s + config.duration_s, count), "127.0.0.1", port
        )
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    elapsed_s = time.monotonic() - start_s
    return Load(
        count.num_requests / elapsed_s,
        count.num_requests * config.output_len / elapsed_s,
        statistics.median(count.ttft_ms),
        count.num_failed,
    )


if __name__ == "__main__":
    sys.exit(main())
