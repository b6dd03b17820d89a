"""The kernel benchmark: what it prints and writes, on a tiny arena."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neojax import _cpu_paged_attn as native
from neojax.bench import __main__ as bench
from neojax.bench import kernel


def test_the_headline_case_is_measured_against_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kernel, "MEASURE_S", 0.01)
    monkeypatch.setattr(kernel, "PROBE_BYTES", 1 << 20)
    output = tmp_path / "kernel.json"
    arguments = ["kernel", "--quick", "--no-compare", "--arena-gib", "0.01", "--cpu-threads", "1,2"]
    assert bench.main([*arguments, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "32/8/128  bfloat16    16    1024" in printed
    content = json.loads(output.read_text())
    assert [r["case"]["num_threads"] for r in content["results"]] == [1, 2]
    for result in content["results"]:
        assert result["case"]["isa"] == native.isa()
        # 16 sequences of 1024 tokens, 8 heads of 128, K and V, two bytes each.
        bytes_read = result["gb_per_s"] * result["us_per_call"] * 1e3
        assert bytes_read == pytest.approx(16 * 1024 * 8 * 128 * 2 * 2)
        assert result["share"] == pytest.approx(result["gb_per_s"] / result["probe_gb_per_s"])
        assert result["walk_gb_per_s"] > 0
        assert result["us_best"] <= result["us_per_call"]
    assert 0 < content["smallest_us"]["armed"] < 1e5
    assert content["cached_gb_per_s"] > 0


@pytest.mark.parametrize(
    ("num_threads", "probe", "is_void"), [(2, 17.9, True), (2, 18.0, False), (16, 119.0, True)]
)
def test_a_run_is_void_where_memory_gave_too_little(num_threads: int, probe: float, is_void: bool):
    case = kernel.Case(32, 8, 128, "bfloat16", 16, 1024, num_threads, "scalar")
    result = kernel.Result(case, 10.0, 15.0, probe, 5.0, 4.0)
    assert result.is_void == is_void
    assert ("void" in kernel.line(result)) == is_void


def test_results_are_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="part of the bench extra")
    case = kernel.Case(32, 8, 128, "bfloat16", 16, 1024, 2, "scalar")
    picture = tmp_path / "kernel.png"
    kernel.plot([kernel.Result(case, 10.0, 15.0, 20.0, 5.0, 4.0)], str(picture))
    assert picture.stat().st_size > 1000


def test_every_sweep_starts_with_the_headline_and_all_kernels():
    groups = list(kernel.cases(4, native.isa(), full=True))
    assert [case.isa for case in groups[0]] == list(reversed(native.available_isas()))
    assert {case.dtype for group in groups for case in group} == set(kernel.DTYPES)
    assert kernel.thread_counts(6) == [1, 2, 4, 6]
    assert kernel.thread_counts(1) == [1]


def test_an_unknown_benchmark_prints_the_names(capsys: pytest.CaptureFixture[str]):
    assert bench.main(["kernle"]) == 2
    assert "kernel" in capsys.readouterr().err
    assert bench.main(["--help"]) == 0
