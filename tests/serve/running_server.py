"""A server process under test, over the fake engine or the real one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

COMMAND = Path(__file__).with_name("fake_server.py")
# Made once: reading the system's certificates takes longer than most requests here.
TLS = ssl.create_default_context()


class RunningServer:
    """A started server; `url` is known once it listens."""

    def __init__(self, command: list[str], engine_log: Path | None = None) -> None:
        self.engine_log = engine_log
        self.process = subprocess.Popen(
            [*command, "--port", "0"], stderr=subprocess.PIPE, text=True, env=_env()
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.url = wait_for(self._listening, "the server did not listen")
        except AssertionError:
            self.kill()
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def _listening(self) -> str | None:
        found = re.search(r"listening on (https?://\S+),", self.stderr)
        return found[1] if found else None

    @property
    def stderr(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self, timeout_s: float = 60) -> RunningServer:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.stderr
            return self.get("/health").status_code == 200

        wait_for(is_ready, "the server did not get ready", timeout_s)
        return self

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, verify=TLS, **kwargs)

    def post(self, path: str, body: object, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, verify=TLS, **kwargs)

    def complete(self, prompt: object = "1 2 3", **fields: object) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, content: object, **fields: object) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the fake engine received."""
        if self.engine_log is None or not self.engine_log.exists():
            return []
        *lines, _unfinished = self.engine_log.read_text(encoding="utf-8").split("\n")
        return [e for e in map(json.loads, lines) if e["event"] == kind]

    def engine_ids(self, prompt: str, count: int = 1) -> set[str]:
        """Waits until the fake engine has so many requests with this prompt; their ids there."""

        def found() -> set[str] | None:
            ids = {event["id"] for event in self.events("add") if event["prompt"] == prompt}
            return ids if len(ids) >= count else None

        return wait_for(found, f"not {count} requests in the engine")

    def wait_event(self, kind: str, ids: set[str]) -> None:
        """Wait until the fake engine has noted the event for each of these of its requests."""
        wait_for(lambda: ids <= {event["id"] for event in self.events(kind)}, f"no {kind}")

    def metric(self, name: str, **labels: str) -> float:
        """The value of a series; labels may leave some out if one series matches."""
        found = [
            float(line.rsplit(" ", 1)[1])
            for line in self.get("/metrics").text.splitlines()
            if re.match(rf"neojax:{name}[{{ ]", line)
            and all(f'{key}="{value}"' in line for key, value in labels.items())
        ]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def is_alive(self) -> bool:
        """Whether a plain request is answered and /health is green."""
        reply = self.complete("1 2 3", max_tokens=4)
        return reply.status_code == 200 and self.get("/health").status_code == 200

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """End it however it is; nothing happens if it has ended."""
        if self.process.poll() is None:
            self.stop(signal.SIGKILL)

    def wait(self, timeout_s: float = 60) -> int:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not end:\n{self.stderr}") from None
        finally:
            self._reader.join(60)
            assert self.process.stderr is not None
            self.process.stderr.close()
        return code


def start_fake(
    checkpoint: Path, directory: Path, *flags: str, fake: tuple[str, ...] = ()
) -> RunningServer:
    """A server over the fake engine, still loading; `fake` are the options of the engine."""
    log = directory / "engine.log"
    command = [sys.executable, str(COMMAND), "--log", str(log), *fake, "--"]
    is_named = any("--served-model-name" in flag for flag in flags)
    name = () if is_named else ("--served-model-name", "tiny")
    return RunningServer([*command, str(checkpoint), *name, *flags], log)


@contextlib.contextmanager
def serving(
    checkpoint: Path, directory: Path, *flags: str, fake: tuple[str, ...] = ()
) -> Iterator[RunningServer]:
    """A ready server over the fake engine; ended at the end, however the test ended it."""
    server = start_fake(checkpoint, directory, *flags, fake=fake)
    try:
        yield server.wait_ready()
    finally:
        server.kill()


def sent(server: RunningServer, body: dict[str, object]) -> socket.socket:
    """A connection on which a request was sent and nothing is read."""
    address = urlsplit(server.url)
    raw = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sock = socket.create_connection((address.hostname, address.port))
    sock.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return sock


def script(**fields: object) -> str:
    """A prompt that tells the fake engine what to do."""
    return f"[[{json.dumps(fields, ensure_ascii=False)}]]"


def wait_for(condition: Any, message: str, timeout_s: float = 60) -> Any:
    """Poll until the condition is true; its value."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.TransportError):
            if value := condition():
                return value
        time.sleep(0.02)
    raise AssertionError(message)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def _env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("NEOJAX_")}
