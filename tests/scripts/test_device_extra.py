"""scripts/lib/venv.sh: which extra a machine gets, by the driver it shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VENV_SH = Path(__file__).resolve().parents[2] / "scripts" / "lib" / "venv.sh"


def device_extra(directory: Path, nvidia_smi: str, **environment: str) -> str:
    """Runs device_extra where nvidia-smi is the given shell text; returns what it prints."""
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{nvidia_smi}\n", encoding="utf-8")
    program.chmod(0o755)
    result = subprocess.run(
        ["bash", "-euc", f"source {VENV_SH}; python={sys.executable}; device_extra"],
        env={"PATH": f"{directory}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or result.stderr.strip()


@pytest.mark.parametrize(
    ("driver", "extra"),
    [
        ("580.95.05", "cuda13"),
        ("595.10", "cuda13"),
        ("575.51.03", "cuda12"),
        ("525.60.13", "cuda12"),
        ("470.82.01", "cpu"),
    ],
)
def test_the_driver_release_decides(tmp_path: Path, driver: str, extra: str):
    assert device_extra(tmp_path, f"echo {driver}") == extra


def test_several_gpus_count_as_their_one_driver(tmp_path: Path):
    assert device_extra(tmp_path, "echo 580.95.05; echo 580.95.05") == "cuda13"


def test_a_word_overrides_the_driver(tmp_path: Path):
    assert device_extra(tmp_path, "echo 580.95.05", NEOJAX_EXTRA="cpu") == "cpu"


def test_an_unknown_word_is_refused_with_those_that_work(tmp_path: Path):
    answer = device_extra(tmp_path, "echo 580.95.05", NEOJAX_EXTRA="rocm")
    assert "NEOJAX_EXTRA=rocm is not one of cpu, cuda12, cuda13" in answer
