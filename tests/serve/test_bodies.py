"""Bodies and headers that are no request at all: refused without being read to their end."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.serve.errors import expect_error
from tests.serve.running_server import TLS, RunningServer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'"prompt"',
        b"{",
        b'{"prompt": "a"',
        b'{"prompt": "\xc4\xe3"}',
        b'{"prompt": "\\ud83d"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": NaN}',
        b'{"prompt": ' + b"[" * 100_000 + b"}",
        b"\x00" * 100,
        "prompt=a".encode("utf-16"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(server: RunningServer, raw: bytes):
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        reply = httpx.post(server.url + path, content=raw, headers=JSON, timeout=60, verify=TLS)
        assert expect_error(reply)["type"] == "BadRequestError"


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_that_are_none_are_refused(server: RunningServer, number: bytes):
    raw = b'{"prompt": "a", "temperature": ' + number + b"}"
    reply = httpx.post(server.url + COMPLETIONS, content=raw, headers=JSON, timeout=60, verify=TLS)
    assert expect_error(reply)["param"] == "temperature"


def test_a_null_character_in_a_prompt_is_text_like_any_other(server: RunningServer):
    assert server.complete("a\0b").status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_another_content_type_is_refused(server: RunningServer, kind: str | None):
    headers = {} if kind is None else {"Content-Type": kind}
    reply = httpx.post(
        server.url + COMPLETIONS, content=b'{"prompt":"a"}', headers=headers, verify=TLS
    )
    assert "application/json" in expect_error(reply)["message"]


def test_a_body_above_the_limit_is_refused_with_413(server: RunningServer):
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    reply = raw_request(server, f"{head}Content-Length: 100000000\r\n\r\n".encode())
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert b'"error"' in reply


def test_a_chunked_body_above_the_limit_is_refused(server: RunningServer):
    def pieces():
        yield b'{"prompt": "'
        for _ in range(40):
            yield b"x" * 2**20

    try:
        reply = httpx.post(
            server.url + COMPLETIONS, content=pieces(), headers=JSON, timeout=60, verify=TLS
        )
    except httpx.TransportError:
        return  # closed in our face, which is as good
    expect_error(reply, 413)


@pytest.mark.parametrize("num_headers", [1, 100_000])
def test_oversized_headers_are_refused_without_being_stored(
    server: RunningServer, num_headers: int
):
    before = resident_bytes(server)
    size = 50_000_000 // num_headers
    headers = "".join(f"X-{i}: {'x' * size}\r\n" for i in range(num_headers))
    reply = raw_request(server, f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
    assert reply == b"" or reply.split()[1].startswith(b"4")
    assert resident_bytes(server) - before < 10_000_000


def resident_bytes(server: RunningServer) -> int:
    """Memory that the HTTP process holds."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])  # type: ignore[index]


def raw_request(server: RunningServer, request: bytes) -> bytes:
    """Send bytes and read until the server closes."""
    address = urlsplit(server.url)
    reply = b""
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
        try:
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(65536):
                reply += piece
        except OSError:
            pass
    return reply
