"""The one command and its subcommands."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from neojax.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_page(command: str):
    ended = subprocess.run(
        [sys.executable, "-m", "neojax", command, "--help"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert "neojax" in ended.stdout


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_a_command_that_does_not_exist_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
):
    assert main(["sevre"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err
    assert main([]) == 2


def test_the_console_script_is_this_command():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert pyproject["project"]["scripts"] == {"neojax": "neojax.__main__:main"}
