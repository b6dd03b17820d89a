"""The survey: cells are the seed's, loads fit every policy, lost cells are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neojax.plan import survey


def test_cells_are_the_seeds_and_every_request_fits_the_device_pool():
    cells = [survey.draw_cell(number, seed=0) for number in range(60)]
    assert cells == [survey.draw_cell(number, seed=0) for number in range(60)]
    assert survey.draw_cell(0, seed=1) != cells[0]
    assert {cell.model for cell in cells} == {"llama-2-7b", "llama-3.1-8b"}
    for cell in cells:
        lengths = cell.traffic().lengths
        assert len(lengths) >= 30
        assert max(map(sum, lengths)) <= cell.device_kv_tokens
    limits = cells[0].scenario().limits
    assert limits.num_device_blocks * limits.block_size == cells[0].device_kv_tokens


def test_lost_cells_are_counted_and_named():
    cells = [survey.draw_cell(number, seed=0) for number in range(4)]
    rates = [{"device-only": 10.0, "auto": rate} for rate in (10.0, 9.96, 9.8, 9.0)]
    text = survey.report(cells, rates, ["device-only", "auto"])
    assert text.splitlines()[2].split("|")[-3:-1] == ["    50.0% ", "      1 "]
    assert "auto/device-only 0.980 in 2: " in text
    assert "auto/device-only 0.900 in 3: " in text
    assert " in 1: " not in text


def test_chosen_cells_are_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "survey.jsonl"
    flags = ["--only", "0,5", "--policies", "device-only,auto", "--output", str(output)]
    assert survey.main(flags) == 0
    assert "auto/device-only" in capsys.readouterr().out
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["cell"]["number"] for line in lines] == [0, 5]
    assert all(line["auto"]["summary"]["num_errors"] == 0 for line in lines)
