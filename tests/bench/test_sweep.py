"""`bench throughput` and `bench sweep` on a tiny model, from command line to table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neojax.bench import __main__ as bench
from neojax.bench import sweep, sweep_table, throughput


def flags(**settings: object) -> list[str]:
    """Settings as a command line."""
    return [
        word
        for name, value in settings.items()
        for word in ("--" + name.replace("_", "-"), str(value))
    ]


ENGINE = flags(
    load_format="dummy",
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    cpu_kv_gib=0.01,
    num_gpu_blocks_override=16,
)


@pytest.fixture
def engine_flags(tiny_checkpoint: Path) -> list[str]:
    return ["--model", str(tiny_checkpoint), *ENGINE, "--enforce-eager"]


def test_throughput_compares_policies_and_writes_json(
    engine_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "result.json"
    load = flags(
        workload="20/4~0.5",
        arrivals="closed:2,poisson:50",
        num_requests=4,
        repeats=2,
        policies="auto,full",
        output=output,
    )
    assert bench.main(["throughput", *engine_flags, *load]) == 0
    printed = capsys.readouterr().out
    assert "full poisson:50" in printed
    report = json.loads(output.read_text())
    assert report["command"][3] == "throughput"
    by_name = {(r["policy"], r["arrivals"]): r["summary"] for r in report["results"]}
    assert len(by_name) == 4
    assert by_name["auto", "closed:2"]["host_share"] == 0
    assert by_name["full", "closed:2"]["host_share"] == 1
    assert all(s["num_requests"] == 4 and s["requests_per_s"] > 0 for s in by_name.values())


def test_a_load_that_cannot_be_is_refused_before_the_engine_is_built(
    engine_flags: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(throughput, "build", lambda *_: pytest.fail("an engine was built"))
    for load in (flags(arrivals="sometimes"), flags(workload="x"), flags(warm_up=200)):
        with pytest.raises(SystemExit, match="error: "):
            bench.main(["throughput", *engine_flags, *load])


def test_a_sweep_resumes_where_its_file_stops(
    engine_flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    output = tmp_path / "sweep.jsonl"
    swept = {
        "output": output,
        "cells": "all:8/4,64:8/4:3=device-only+full",
        "policies": "device-only,auto",
        "repeats": 2,
        "num_requests": 3,
    }
    command = ["sweep", *engine_flags, *flags(**swept)]
    assert bench.main(command) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(x["cell"], x["policy"], x["repeat"]) for x in lines] == [
        ("all:8/4:3", "device-only", 0),
        ("all:8/4:3", "auto", 0),
        ("64:8/4:3", "device-only", 0),
        ("64:8/4:3", "full", 0),
        ("all:8/4:3", "auto", 1),
        ("all:8/4:3", "device-only", 1),
        ("64:8/4:3", "full", 1),
        ("64:8/4:3", "device-only", 1),
    ]
    for line in lines:
        steps = line["counters"]
        assert (steps["steps_pipelined"] > 0) == (line["policy"] == "full")
        assert line["summary"]["num_requests"] == 3
    printed = capsys.readouterr().out
    row = next(r for r in printed.splitlines() if r.startswith("| 64:8/4:3 device-only"))
    assert " 1.000 |" in row

    kept = output.read_text().splitlines()
    # As if killed in the middle of the last line.
    output.write_text("\n".join(kept[:-1]) + "\n" + kept[-1][:40])
    assert bench.main(command) == 0
    assert [json.loads(x)["policy"] for x in output.read_text().splitlines()[7:]] == ["device-only"]

    monkeypatch.setattr(sweep, "build", lambda *_: pytest.fail("an engine was built"))
    assert bench.main(command) == 0
    assert bench.main(["sweep", "--output", str(output), "--report"]) == 0
    # Another setting is another measurement.
    with pytest.raises(pytest.fail.Exception):
        bench.main(["sweep", *engine_flags, *flags(**swept | {"seed": 4})])


def test_no_run_begins_after_the_time_budget(engine_flags: list[str], tmp_path: Path):
    output = tmp_path / "sweep.jsonl"
    swept = flags(cells="all:8/4", num_requests=2, time_budget_s=-1, output=output)
    assert bench.main(["sweep", *engine_flags, *swept]) == 0
    assert not output.exists()


def test_ratios_pair_the_runs_of_one_repeat():
    def run(policy: str, repeat: int, rate: float) -> dict[str, object]:
        distribution = dict.fromkeys(("mean", "p50", "p90", "p99"), 1.0)
        names = sweep_table.Summary.__slots__
        summary = {name: distribution if name.endswith("_s") and name in
                   ("ttft_s", "tpot_s", "itl_s", "e2e_s", "device_tpot_s", "host_tpot_s")
                   else 1.0 for name in names}  # fmt: skip
        summary |= {"requests_per_s": rate, "num_errors": 0}
        return {
            "cell": "all:8/4", "policy": policy, "repeat": repeat, "settings": {}, "hardware": "h",
            "summary": summary,
            "counters": {"steps_device_only": 5, "steps_pipelined": 2, "steps_rolling": 0,
                         "steps_lost": 1, "steps_lost_s": 0.003},
        }  # fmt: skip

    lines = [run("device-only", 0, 10), run("device-only", 1, 20), run("auto", 1, 25)]
    text = sweep_table.sweep_table(lines)
    row = next(r for r in text.splitlines() if r.startswith("| all:8/4 auto"))
    assert " 1.250 | " in row
    assert " 1 (3) | " in row
    # What finished before the run was cut off says less than all tokens of the settled part.
    lines[-1]["summary"] |= {"num_errors": 7, "settled_tokens_per_s": 1.5}
    assert " 1.500 | " in sweep_table.sweep_table(lines)


@pytest.mark.parametrize("cells", ["8/4", "0:8/4", "x:8/4", "all:zzz", "all:8/4:0"])
def test_a_cell_that_cannot_be_is_refused(cells: str):
    with pytest.raises(SystemExit, match="error: "):
        bench.main(["sweep", "--cells", cells])


def test_an_unknown_policy_is_refused_before_the_engine_is_built(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sweep, "build", lambda *_: pytest.fail("an engine was built"))
    with pytest.raises(SystemExit, match="'none' is not one of"):
        bench.main(["sweep", "--cells", "all:8/4=none"])
