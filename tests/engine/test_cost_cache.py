"""Measured costs on disk: found again, and measured anew whenever they may not hold."""

from __future__ import annotations

import json
import logging

import pytest

from neojax.engine import cost_cache
from neojax.engine.cost_cache import cached_costs
from neojax.runner.profiler import Profiler
from tests.scheduler.tables import make_tables


class Measure:
    """Counts its calls and gives other tables each time."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return make_tables(num_layers=self.calls)


@pytest.fixture
def measure():
    return Measure()


def test_costs_are_measured_once(tmp_path, measure):
    first = cached_costs(tmp_path / "costs", {"model": "a"}, measure)
    assert cached_costs(tmp_path / "costs", {"model": "a"}, measure) == first
    assert measure.calls == 1


def test_another_model_host_or_version_is_measured_on_its_own(tmp_path, measure, monkeypatch):
    cached_costs(tmp_path, {"model": "a"}, measure)
    cached_costs(tmp_path, {"model": "b"}, measure)
    assert measure.calls == 2
    monkeypatch.setattr(cost_cache, "_cpu_model", lambda: "another CPU")
    cached_costs(tmp_path, {"model": "a"}, measure)
    assert measure.calls == 3
    monkeypatch.setattr(cost_cache.jax, "__version__", "9.9")
    cached_costs(tmp_path, {"model": "a"}, measure)
    assert measure.calls == 4
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    cached_costs(tmp_path, {"model": "a"}, measure)
    assert measure.calls == 5


def test_tables_measured_another_way_are_not_taken_from_the_disk(tmp_path, measure, monkeypatch):
    for method, calls in ((1, 1), (1, 1), (2, 2), (1, 2)):
        monkeypatch.setattr(Profiler, "METHOD", method)
        cached_costs(tmp_path, {"model": "a"}, measure)
        assert measure.calls == calls


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": {}}', "half", "other"])
def test_a_damaged_file_is_measured_again_and_replaced(tmp_path, measure, caplog, damage):
    cached_costs(tmp_path, {"model": "a"}, measure)
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    if damage == "half":
        damage = whole[: len(whole) // 2]
    elif damage == "other":
        damage = json.dumps(json.loads(whole) | {"tables": {"num_layers": 3}})
    path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        again = cached_costs(tmp_path, {"model": "a"}, measure)
    assert measure.calls == 2
    assert "measured again" in caplog.text
    assert cached_costs(tmp_path, {"model": "a"}, measure) == again
    assert measure.calls == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, measure, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert cached_costs(tmp_path / "file" / "costs", {}, measure).num_layers == 1
    assert "not kept" in caplog.text
