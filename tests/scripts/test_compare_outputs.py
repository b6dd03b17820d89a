"""scripts/compare_outputs: the report on whether placement changes tokens."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compare_outputs"


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    spec = spec_from_loader("compare_outputs", SourceFileLoader("compare_outputs", str(SCRIPT)))
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["compare_outputs"] = module  # its dataclasses look for their module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


class FakeScorer:
    """Logits that grow with the token, and what it was asked for."""

    def logits(self, ids):
        self.ids = list(ids)
        return np.arange(10, dtype=np.float32)


def run_of(script, *token_ids):
    return script.Run(script.WAYS[0], [list(ids) for ids in token_ids], 0, 0, 0)


def test_differences_are_measured_at_the_first_token_that_differs(script, capsys):
    reference = run_of(script, [1, 2, 3], [4, 5, 6])
    other = run_of(script, [1, 2, 3], [4, 7, 9])
    scorer = FakeScorer()
    assert script.compare(reference, reference, [[0], [9]], scorer) == []
    assert script.compare(other, reference, [[0], [9]], scorer) == [2.0]
    assert scorer.ids == [9, 4]
    rows = capsys.readouterr().out.splitlines()
    assert "2/2" in rows[0]
    assert "6/6" in rows[0]
    assert "1/2" in rows[1]
    assert "4/6" in rows[1]


def test_an_answer_that_ends_early_is_never_a_tie(script):
    reference, shorter = run_of(script, [1, 2]), run_of(script, [1])
    assert script.compare(shorter, reference, [[0]], FakeScorer()) == [float("inf")]


def test_the_report_of_a_tiny_model_finds_every_token_the_same(tiny_checkpoint, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\nanother, longer prompt\nthree\n")
    command = [sys.executable, str(SCRIPT), str(tiny_checkpoint), "--load-format", "dummy"]
    command += ["--max-tokens", "20", "--prompts", str(prompts)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Every token is the same." in result.stdout or "ties within" in result.stdout
    rows = {line[:24].strip(): line[24:].split() for line in result.stdout.splitlines()}
    assert rows["all on the host"][-2] == "3"
    assert int(rows["all on the host"][-3]) > 0
