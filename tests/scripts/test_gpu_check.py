"""The command for GPU machines on a tiny model: what it measures there must not break unseen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import figures, forward_checks, sections
from tests.gpu.suite import run_tests
from tests.scripts.as_module import as_module


@pytest.fixture(scope="module")
def script():
    return as_module("gpu_check")


@pytest.fixture
def check(script, tmp_path, monkeypatch, capfd):
    """check(sections): what each of them appends to a log, and all that is printed.

    With the library that is there, which may be older than a checkout but is what is tested here.
    """
    log = tmp_path / "log"
    monkeypatch.setattr(script, "build_library", lambda: None)

    def run(names: list[str]) -> tuple[dict[str, figures.Line], str]:
        arguments = ["--tiny", "--budget", "20", "--log", str(log), "--section", *names]
        code = script.main(arguments)
        printed = capfd.readouterr()
        assert code == 0, printed.err[-4000:]
        lines = script.read(log)
        assert {line["section"] for line in lines} == set(names)
        return {line["section"]: line for line in lines}, printed.out

    return run


def test_sections_that_reach_into_the_runner(script, check, tmp_path, capfd):
    found, printed = check(["lane", "swap", "host_time", "rolling"])
    assert len(found["rolling"]["points"]) == 2
    assert found["rolling"]["hops"].keys() == {"4"}
    assert len(found["lane"]["points"]) == 1
    for line in found.values():
        assert line.keys() >= {"time", "commit", "device", "jax", "load", "seconds"}
    assert "| rolling | points of the grid | 2 |" in printed
    assert script.main(["--report", "--log", str(tmp_path / "log")]) == 0
    report = capfd.readouterr().out
    assert f"| {found['swap']['commit']} | tiny | {found['swap']['device']} |" in report
    printed_rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(report.splitlines()) == len(printed_rows)


@pytest.mark.slow
def test_all_other_sections(check):
    names = ["tests", "start", "right", "forced", "soak", "decode", "prefill", "throughput"]
    found, _ = check([*names, "compiles"])
    assert found["right"]["off"] == 0
    assert found["soak"]["failure"] is None
    assert found["compiles"]["compiles"] == 0


def test_every_section_has_a_process_a_function_and_figures(script):
    assert [set(group) for group in script.GROUPS] == [
        set(row) for row in sections.SECTIONS.values()
    ]
    assert set(script.ALL) == figures.FIGURES.keys()


def test_sections_that_start_processes_leave_the_device_to_them():
    code = "import tests.gpu.sections; from jax._src import xla_bridge; "
    code += "print(xla_bridge.backends_are_initialized())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"


def test_a_section_that_fails_leaves_the_others_to_another_process(script, tmp_path, monkeypatch):
    log = tmp_path / "log"
    calls = []

    def child(command, **_):
        """Sections `lane` raises in, and `soak` dies in without a word."""
        names = command[command.index("tests.gpu.sections") + 1 : command.index("--load")]
        calls.append(names)
        for name in names:
            if name == "soak":
                return subprocess.CompletedProcess(command, -9)
            found = {"error": "ValueError: no\nmore"} if name == "lane" else {"off": 0}
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"section": name, **found}) + "\n")
            if "error" in found:
                return subprocess.CompletedProcess(command, 1)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", child)
    args = script.parse(["--log", str(log)])
    script.run(["right", "lane", "soak", "forced"], args, {"load": "tiny"})
    assert calls == [["right", "lane", "soak", "forced"], ["soak", "forced"], ["forced"]]
    lines = script.read(log)
    assert [line["section"] for line in lines] == ["right", "lane", "soak", "forced"]
    assert lines[2]["error"] == "its process ended with -9"
    assert figures.is_wrong(lines[1])
    assert [row.measured for row in figures.rows([lines[1]])] == ["ValueError: no"]


def test_the_table_has_the_newest_figures_of_each_load_and_what_went_wrong():
    def line(**more):
        return {"section": "start", "cold_s": 50.0, "warm_s": 31.0, "load": "8b"} | more

    rows = figures.rows([line(), line(error="died"), line(warm_s=29.0, commit="b")])
    assert [(row.figure, row.measured, row.is_met) for row in rows] == [
        ("nothing cached", "50.0 s", ""),
        ("programs cached", "29.0 s", "yes"),
    ]
    assert figures.rows([line()])[1].is_met == "no"
    assert figures.rows([line(load="tiny")])[1].target == ""
    assert len(figures.rows([line(), line(load="tiny")])) == 4
    assert [row.figure for row in figures.rows([line(), line(error="died")])][-1] == "error"
    (row,) = figures.rows([{"section": "start", "cold_s": 1.0}])
    assert row.measured == "its line has no 'warm_s'"
    found = {"section": "right", "tokens": 9, "off": 1, "left_out": [], "load": "tiny"}
    assert figures.is_wrong(found)
    assert not figures.is_wrong(found | {"off": 0, "left_out": ["gqa3"]})


def test_the_forward_passes_stop_at_their_budget_and_say_what_is_missing(capsys):
    found = forward_checks.right(0.0)
    assert found["complete"] == []
    assert len(found["left_out"]) == 4
    assert "ended before" in capsys.readouterr().out
    found = forward_checks.right(1.0)  # the first model's first programs take longer
    assert found["off"] == 0
    assert found["left_out"]


GPU_TESTS = """
import time
from pathlib import Path
import pytest

pytestmark = pytest.mark.gpu

def test_one(): pass

def test_two(): assert False

def test_three():
    Path({reached!r}).touch()
    time.sleep({seconds})
"""


def test_the_gpu_tests_are_counted_and_interrupted_at_their_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take a second each time
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    file, reached = tmp_path / "test_it.py", tmp_path / "reached"
    file.write_text(GPU_TESTS.format(reached=str(reached), seconds=0))
    counts = {"passed": 2, "failed": 1, "skipped": 0}
    assert run_tests(600, (str(file),)) == counts | {"in_time": True}
    reached.unlink()
    file.write_text(GPU_TESTS.format(reached=str(reached), seconds=600))

    class LimitAtTestThree(subprocess.Popen):
        def wait(self, timeout=None):
            while timeout == 600 and not reached.exists():
                time.sleep(0.01)
            return super().wait(0.01 if timeout == 600 else timeout)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", LimitAtTestThree)
        found = run_tests(600, (str(file),))
    assert found == counts | {"passed": 1, "in_time": False}
    file.write_text("")
    with pytest.raises(RuntimeError, match="pytest ended with 5"):
        run_tests(600, (str(file),))


def test_a_library_older_than_its_sources_is_built_anew(script, tmp_path, monkeypatch):
    native = script.native_library
    (tmp_path / "ffi").mkdir()
    library, source = tmp_path / "it.so", tmp_path / "ffi" / "it.cc"
    for path, when in ((tmp_path / "CMakeLists.txt", 1), (source, 2), (library, 3)):
        path.touch()
        os.utime(path, (when, when))
    assert not native.is_older_than_its_sources(library, tmp_path)
    os.utime(source, (4, 4))
    assert native.is_older_than_its_sources(library, tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(RuntimeError, match=r"cmake and ninja not found.*pip install cmake ninja"):
        native.build(tmp_path)


def test_what_is_built_takes_the_place_of_an_old_library(script, tmp_path, monkeypatch, capsys):
    there, built = tmp_path / script.native_library.NAME, tmp_path / "built.so"
    there.write_text("old")
    built.write_text("new")
    found = SimpleNamespace(origin=str(there))
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda _: found)
    monkeypatch.setattr(script.native_library, "is_older_than_its_sources", lambda _: False)
    monkeypatch.setattr(script.native_library, "build", lambda _: built)
    script.build_library()
    assert there.read_text() == "old"
    monkeypatch.setattr(script.native_library, "is_older_than_its_sources", lambda _: True)
    script.build_library()
    assert there.read_text() == "new"

    def no_tools(_: Path) -> Path:
        raise RuntimeError("cmake not found")

    monkeypatch.setattr(script.native_library, "build", no_tools)
    script.build_library()
    assert "older than its sources, and used as it is: cmake not found" in capsys.readouterr().out
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="cmake not found"):
        script.build_library()


def test_a_report_of_nothing_says_so(script, tmp_path):
    with pytest.raises(SystemExit, match="there is no"):
        script.main(["--report", "--log", str(tmp_path / "nothing")])
