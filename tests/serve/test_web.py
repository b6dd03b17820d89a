"""What browsers and proxies need: CORS and TLS."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.serve.running_server import serving, start_fake, wait_for


def test_only_pages_of_an_allowed_origin_may_call_the_server(tiny_checkpoint: Path, tmp_path: Path):
    flags = ("--allowed-origins", "https://a.example, https://b.example", "--api-key", "k")
    with serving(tiny_checkpoint, tmp_path, *flags) as server:
        for origin, allowed in [("https://b.example", True), ("https://c.example", False)]:
            preflight = httpx.options(
                f"{server.url}/v1/chat/completions",
                headers={
                    "Origin": origin,
                    "Access-Control-Request-Method": "POST",
                    "Access-Control-Request-Headers": "authorization,content-type",
                },
            )
            assert (preflight.status_code == 200) is allowed
            reply = server.get(
                "/v1/models", headers={"Origin": origin, "Authorization": "Bearer k"}
            )
            assert reply.status_code == 200
            assert (reply.headers.get("access-control-allow-origin") == origin) is allowed
        refused = server.get("/v1/models", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_without_the_flag_no_page_may_call_the_server(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path) as server:
        reply = server.get("/v1/models", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in reply.headers


def test_a_certificate_that_cannot_be_read_ends_the_start(tmp_path: Path):
    command = [sys.executable, "-m", "neojax.serve", "--ssl-certfile", str(tmp_path / "none.pem")]
    ended = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "none.pem" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_a_certificate_makes_it_https(tiny_checkpoint: Path, tmp_path: Path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-out", cert, "-keyout", key], check=True, capture_output=True)
    flags = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    server = start_fake(tiny_checkpoint, tmp_path, *flags)
    try:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(verify=context, base_url=server.url) as client:
            wait_for(lambda: client.get("/health").status_code == 200, "not ready")
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    finally:
        assert server.stop() == 0
