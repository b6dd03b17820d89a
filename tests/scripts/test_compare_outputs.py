"""scripts/compare_outputs: the report on whether placement changes tokens."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from tests.scripts.as_module import SCRIPTS, as_module


@pytest.fixture(scope="module")
def script():
    return as_module("compare_outputs")


class FakeScorer:
    """Logits that grow with the token, and what it was asked for."""

    def logits(self, ids):
        self.ids = list(ids)
        return np.arange(10, dtype=np.float32)


def run_of(script, *token_ids, logprob=-1.0):
    ids = [list(ids) for ids in token_ids]
    logprobs = [[logprob] * len(tokens) for tokens in ids]
    return script.Run(script.WAYS[0], ids, logprobs, 0, 0, 0, 0, 0)


def test_differences_are_measured_at_the_first_token_that_differs(script, capsys):
    reference = run_of(script, [1, 2, 3], [4, 5, 6])
    other = run_of(script, [1, 2, 3], [4, 7, 9])
    scorer = FakeScorer()
    assert script.compare(reference, reference, [[0], [9]], scorer) == []
    assert script.compare(other, reference, [[0], [9]], scorer) == [2.0]
    drifted = dataclasses.replace(reference, logprobs=[[-1.0, -1.5, -1.0], [-1.0] * 3])
    assert script.compare(drifted, reference, [[0], [9]], scorer) == []
    assert scorer.ids == [9, 4]
    rows = capsys.readouterr().out.splitlines()
    assert "2/2" in rows[0]
    assert "6/6" in rows[0]
    assert "1/2" in rows[1]
    assert "4/6" in rows[1]
    assert "0.0e+00" in rows[1]
    assert "5.0e-01" in rows[2]


def test_an_answer_that_ends_early_is_never_a_tie(script):
    reference, shorter = run_of(script, [1, 2]), run_of(script, [1])
    assert script.compare(shorter, reference, [[0]], FakeScorer()) == [float("inf")]


def test_the_report_of_a_tiny_model_finds_every_token_the_same(script, tiny_checkpoint, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\nanother, longer prompt\nthree\n")
    command = [sys.executable, str(SCRIPTS / "compare_outputs"), str(tiny_checkpoint)]
    command += ["--load-format", "dummy", "--max-tokens", "20", "--prompts", str(prompts)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Every token is the same." in result.stdout or "ties within" in result.stdout
    rows = {line[:26].strip(): line[26:].split() for line in result.stdout.splitlines()}
    header = ("pipelined", "rolling", "to host", "swapped", "preempted")
    counts = {
        name: dict(zip(header, map(int, cells[-5:]), strict=True))
        for name, cells in rows.items()
        if name in {way.name for way in script.WAYS}
    }
    assert set(counts) >= {way.name for way in script.WAYS if not way.needs_swap}
    assert counts["all on the host"]["to host"] == 3
    assert counts["all on the host"]["pipelined"] > 0
    assert counts["rolling, all on the host"]["rolling"] > 0
