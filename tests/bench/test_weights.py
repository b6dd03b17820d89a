"""The load benchmark, on a model of a few kilobytes."""

from __future__ import annotations

import dataclasses
import json

from neojax.bench import weights


def test_it_loads_what_it_wrote_and_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    tiny = dataclasses.replace(
        weights.LLAMA_8B,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )
    monkeypatch.setattr(weights, "LLAMA_8B", tiny)
    figures = tmp_path / "figures.json"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = ["--layers", "2", "--repeats", "1", "--dtype", "float32"]
    assert weights.main([*arguments, "--directory", str(scratch), "--json", str(figures)]) == 0
    assert list(scratch.iterdir()) == []
    written = json.loads(figures.read_text())
    (load,) = written["loads"]
    num_parameters = dataclasses.replace(tiny, num_layers=2).num_parameters
    assert load["weight_bytes"] == 4 * num_parameters
    assert written["bytes"] > 2 * num_parameters  # stored in bfloat16
    assert "| load as float32 on cpu |" in capsys.readouterr().out
