"""The repository itself: its layout, who may import whom, and versions written in two places."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500

# fmt: off
TOP_LEVEL = {
    ".bazelrc", ".bazelversion", ".ci", ".clang-format", ".gitignore", ".pre-commit-config.yaml",
    "BUILD", "CHANGELOG.md", "CMakeLists.txt", "CONTRIBUTING.md", "LICENSE", "MODULE.bazel",
    "README.md", "docs", "ffi", "models", "neojax", "pyproject.toml", "scripts",
    "tests",
}
# fmt: on

# Arrows go down only: a part may import itself, `anywhere` and what stands beside it here.
ANYWHERE = {"config", "environment", "logprobs", "sampling_params"}
ARROWS = {
    "__main__": set(),
    "config": set(),
    "environment": set(),
    "logprobs": set(),
    "sampling_params": set(),
    "outputs": set(),
    "text": {"models"},
    "hub": set(),
    "models": set(),
    "scheduler": set(),
    "ops": {"_cpu_paged_attn"},
    "kv": {"ops", "_cpu_paged_attn"},
    "runner": {"kv", "ops", "models", "scheduler", "_cpu_paged_attn"},
    "engine": {"runner", "scheduler", "models", "kv", "hub", "text", "log"},
    "serve": {"engine", "text", "hub", "cli", "log"},
    "convert": {"hub", "models", "text"},
    "llm": {"engine", "text", "hub", "outputs"},
    "bench": {"engine", "scheduler", "models", "hub", "cli", "serve", "text", "_cpu_paged_attn"},
    "plan": {"scheduler", "models", "hub", "bench", "cli"},
    "cli": set(),
    "log": set(),
}


def tracked_files() -> list[Path]:
    """What git holds, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def imported_names(path: Path) -> set[str]:
    """Dotted names of all that a module imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(path: Path) -> str:
    """The part of neojax that a file belongs to."""
    return "models" if path.parts[0] == "models" else Path(path.parts[1]).stem


def modules() -> list[Path]:
    """The Python files of the package, models/ included."""
    return [
        path
        for path in tracked_files()
        if path.suffix == ".py" and path.parts[0] in ("neojax", "models")
    ]


def test_the_top_level_holds_only_what_the_layout_names():
    assert {path.parts[0] for path in tracked_files()} <= TOP_LEVEL


def test_no_source_file_is_longer_than_a_reader_can_hold():
    too_long = {
        str(path): num_lines
        for path in tracked_files()
        if path.suffix in (".py", ".pyi", ".cc", ".h", ".sh") and "third_party" not in path.parts
        if (num_lines := len((ROOT / path).read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert too_long == {}


# The package's face, neojax/__init__.py, imports what it re-exports.
@pytest.mark.parametrize("path", [p for p in modules() if part_of(p) != "__init__"], ids=str)
def test_imports_follow_the_arrows_of_the_layout(path: Path):
    part = part_of(path)
    allowed = ARROWS[part] | {part} | (ANYWHERE if part not in ANYWHERE else set())
    imported = {name.split(".")[1] for name in imported_names(path) if name.startswith("neojax.")}
    assert imported <= allowed


@pytest.mark.parametrize(
    "part", ["config", "sampling_params", "scheduler", "serve", "text", "hub", "plan"]
)
def test_what_needs_no_device_imports_no_jax(part: str):
    for path in modules():
        if part_of(path) == part:
            tops = {name.split(".")[0] for name in imported_names(path)}
            assert not tops & {"jax", "jaxlib", "flax"}, path


def test_docs_structure_names_every_source_file_and_no_other():
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`.*?) \|", page, re.M)
    named = {name.split("/")[-1] for cell in first_cells for name in re.findall(r"`(.+?)`", cell)}
    files = {
        path.stem
        for path in tracked_files()
        if path.parts[0] in ("neojax", "models", "ffi") and path.suffix in (".py", ".cc", ".h")
        if not {"third_party", "tests"} & set(path.parts)
    } - {"__init__"}
    stands_for = {name: fnmatch.filter(files, name) for name in named}
    assert files - {stem for stems in stands_for.values() for stem in stems} == set()
    scripts = {"run_all", "run_aarch64", "run_bazel", ""}
    assert {name for name, stems in stands_for.items() if not stems} - scripts == set()


@pytest.mark.parametrize("tool", ["ruff", "clang-format"])
def test_pre_commit_runs_the_versions_that_the_tests_run(tool: str):
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    dev = pyproject["project"]["optional-dependencies"]["dev"]
    (pinned,) = [line for line in dev if line.startswith(f"{tool}==")]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert set(re.findall(rf"\b{tool}==[\d.]+", hooks)) == {pinned}


def test_every_script_is_executable_and_parses():
    scripts = [path for path in tracked_files() if path.parts[0] in ("scripts", ".ci")]
    commands = [path for path in scripts if path.suffix == "" and "lib" not in path.parts]
    assert commands
    for path in commands:
        assert (ROOT / path).stat().st_mode & 0o100, f"{path} is not executable"
    for path in scripts:
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.suffix == ".sh" or text.startswith("#!/usr/bin/env bash"):
            subprocess.run(["bash", "-n", path], cwd=ROOT, check=True)
