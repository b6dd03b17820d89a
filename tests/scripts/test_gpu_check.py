"""The command for GPU machines on a tiny model: what it measures there must not break unseen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check"


def check(log: Path, sections: list[str]) -> dict[str, dict[str, object]]:
    """What each section appends to the log."""
    command = [sys.executable, str(SCRIPT), "--tiny", "--budget", "20", "--log", str(log)]
    result = subprocess.run(
        [*command, "--section", *sections], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [line["section"] for line in lines] == sections
    return {line["section"]: line for line in lines}


def test_sections_that_reach_into_the_runner(tmp_path):
    found = check(tmp_path / "log", ["lane", "swap", "host_time", "rolling"])
    assert len(found["rolling"]["points"]) == 2
    assert found["rolling"]["hops"].keys() == {"4"}
    assert len(found["lane"]["points"]) == 1


@pytest.mark.slow
def test_all_other_sections(tmp_path):
    sections = ["start", "right", "forced", "soak", "decode", "prefill", "throughput", "compiles"]
    found = check(tmp_path / "log", sections)
    assert found["right"]["off"] == 0
    assert found["soak"]["failure"] is None
    assert found["compiles"]["compiles"] == 0
