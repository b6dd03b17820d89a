"""`bench serve` against the real HTTP server over the fake engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from neojax.bench import __main__ as bench
from tests.serve.running_server import serving

pytest.importorskip("openai", reason="part of the bench extra")


@pytest.fixture(scope="module")
def url(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    with serving(tiny_checkpoint, tmp_path_factory.mktemp("server")) as server:
        yield server.url + "/v1"


def run(url: str, *flags: str) -> int:
    return bench.main(["serve", "--base-url", url, "--max-token-id", "99", *flags])


@pytest.mark.parametrize("arrivals", ["closed:2", "poisson:100", "all"])
def test_every_token_is_received_and_timed(
    url: str, arrivals: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "result.json"
    flags = ["--workload", "10/5", "--num-requests", "6", "--output", str(output)]
    assert run(url, "--arrivals", arrivals, *flags) == 0
    assert f"10/5 {arrivals}, 6 requests" in capsys.readouterr().out
    summary = json.loads(output.read_text())["summary"]
    assert summary["output_tokens"] == 30
    assert summary["input_tokens"] == 60
    assert 0 < summary["ttft_s"]["p50"] <= summary["e2e_s"]["p50"]


def test_refused_requests_are_counted_by_reason(
    url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    file = tmp_path / "trace.jsonl"
    row = '{{"timestamp": 0, "input_length": {}, "output_length": 3}}\n'
    file.write_text(row.format(5) + row.format(5000))
    assert run(url, "--arrivals", f"trace:{file}") == 1
    printed = capsys.readouterr()
    assert re.search("1 requests failed: .*5000", printed.err)
    assert "1 requests" in printed.out


def test_a_server_that_is_not_there_is_said_so():
    with pytest.raises(SystemExit, match="does not serve"):
        run("http://127.0.0.1:9/v1")


def test_extra_fields_must_be_an_object(url: str):
    with pytest.raises(SystemExit, match="must be a JSON object"):
        run(url, "--extra-body", "[]")
