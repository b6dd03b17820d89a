"""Measured costs: complete, of the programs that steps run, and nothing compiled for them."""

from __future__ import annotations

import pytest

from neojax.runner import profiler
from neojax.runner.shapes import Shape
from neojax.scheduler.costs import CostTables
from neojax.scheduler.plan import Mode
from tests.engine.tiny import (
    assert_same_tokens,
    mixed_requests,
    run_all,
    tiny_engine,
    tiny_model,
)


def test_profiling_compiles_nothing_and_leaves_a_working_engine(warmed_up):
    engine, _ = warmed_up
    engine.set_policy("auto")
    engine.set_block_limit(14)
    requests = mixed_requests(6, seed=5)
    before = run_all(engine, requests)
    compiles = engine.runner.num_compiles
    tables = engine.runner.profile(progress=False)
    assert engine.runner.num_compiles == compiles
    assert CostTables.from_json(tables.to_json()) == tables
    assert_same_tokens(tiny_model(), requests, before, run_all(engine, requests))


def test_tables_reach_as_far_as_the_engine_does(warmed_up):
    engine, _ = warmed_up
    tables = engine.runner.profile(progress=False)
    assert tables.num_layers == 3
    for mode in (Mode.DEVICE_ONLY, Mode.PIPELINED):
        assert tables.linear[mode].xs[-1] == 64
        assert min(tables.linear[mode].ys) > 0
        assert min(tables.per_step[mode].ys) > 0
    assert tables.prefill_attention.xs[-1] == 64
    assert tables.prefill_attention.ys[-1] == 256  # max_model_len
    assert tables.device_decode.ys[-1] == 40 * 16
    assert tables.host_decode.xs == (1, 8)
    assert tables.host_decode.ys[-1] == 64 * 16
    assert tables.hop.xs[-1] == 8
    assert tables.store.xs[-1] == 64
    assert tables.swap_out.xs[-1] == tables.swap_in.xs[-1] == 256
    assert min(tables.swap_out.ys) > 0


class Clock:
    """Stands in for the profiler's `time`: moves by a millisecond whenever it is looked at."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        self.now_s += 1e-3
        return self.now_s


def test_a_slow_program_shows_in_the_costs_of_its_size_alone(warmed_up, monkeypatch):
    engine, _ = warmed_up
    programs = engine.runner._programs[Shape(64, 0), 0]
    fast, clock = programs.linear, Clock()

    def slow(*args):
        clock.now_s += 5.0
        return fast(*args)

    monkeypatch.setattr(profiler, "time", clock)
    monkeypatch.setattr(programs, "linear", slow)
    linear = engine.runner.profile(progress=False).linear
    assert linear[Mode.PIPELINED](9) >= 5.0
    assert linear[Mode.PIPELINED](64) >= 5.0
    assert linear[Mode.PIPELINED](8) <= 1e-3
    assert linear[Mode.DEVICE_ONLY](64) <= 1e-3


def test_host_attention_is_measured_at_the_rows_and_contexts_of_the_table(warmed_up, monkeypatch):
    engine, _ = warmed_up

    def time_decode(context_lens, tables, num_calls):
        assert tables.shape[0] == len(context_lens)
        return [float(sum(context_lens))] * num_calls

    monkeypatch.setattr(engine.runner.host, "time_decode", time_decode)
    host_decode = engine.runner.profile(progress=False).host_decode
    for num_rows, num_tokens in ((1, 64), (8, 64), (8, 512), (8, 1024)):
        assert host_decode(num_rows, num_tokens) == num_tokens


def test_sizes_cost_what_they_are_padded_to():
    table = profiler._steps({Shape(8, 0): 1.0, Shape(64, 0): 5.0})
    assert [table(n) for n in (1, 8, 9, 40, 64)] == [1, 1, 5, 5, 5]


def test_without_a_host_pool_there_is_nothing_to_measure():
    engine = tiny_engine(tiny_model(), policy="device-only", num_host_blocks=0)
    with pytest.raises(ValueError, match="host pool"):
        engine.runner.profile(progress=False)
    engine.close()
