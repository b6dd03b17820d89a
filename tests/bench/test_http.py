"""The benchmark of the HTTP process, for a moment, over the tiny model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neojax.bench import __main__ as bench
from neojax.bench import null_server


def test_streams_and_whole_answers_are_measured_and_none_fails(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "http.json"
    arguments = ["http", "--model", str(tiny_checkpoint), "--concurrency", "1,3"]
    arguments += ["--output-len", "5", "--duration-s", "0.2", "--repeats", "1"]
    assert bench.main([*arguments, "--output", str(output)]) == 0
    rows = json.loads(output.read_text())
    assert [(row["answer"], row["concurrency"]) for row in rows] == [
        *(("stream", 1), ("stream", 3)),
        *(("whole", 1), ("whole", 3)),
    ]
    for row in rows:
        assert row["num_failed"] == 0
        assert row["tokens_per_s"] == pytest.approx(5 * row["requests_per_s"])
        assert 0 < row["ttft_ms"] < 10_000
    assert "requests/s" in capsys.readouterr().out


def test_the_server_without_a_model_says_how_it_is_called(capsys: pytest.CaptureFixture[str]):
    for arguments, said in (([], "required: STEP_S"), (["soon"], "invalid float value: 'soon'")):
        with pytest.raises(SystemExit):
            null_server.main(arguments)
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        null_server.main(["--help"])
    assert "seconds of a step" in capsys.readouterr().out
