"""The table of a start: time by part, memory by kind."""

from __future__ import annotations

import logging
import time

from neojax.engine.start_report import StartClock, log_start, memory_rows


def test_parts_add_up_and_are_named():
    clock = StartClock()
    before = clock.parts["import"]
    assert 0 < before < 3600
    for _ in range(2):
        with clock.part("weights"):
            time.sleep(0.01)
    assert clock.parts["weights"] >= 0.02
    assert str(clock).startswith(f"{sum(clock.parts.values()):.1f} s: import {before:.1f}, weights")


def test_both_pools_are_shown_in_gib_and_tokens(engine_of, caplog):
    runner = engine_of().runner
    rows = {row.what: row for row in memory_rows(runner, runner.geometry, [])}
    assert rows["device KV"].num_tokens == rows["host KV"].num_tokens == 64 * 16
    # 3 layers x 2 heads x 64 x 4 bytes x (K and V)
    assert rows["device KV"].num_bytes == 64 * 16 * 3072
    assert rows["host prefill scratch"].num_bytes == 2 * (256 + 8 * 16) * 1024
    assert rows["weights"].num_bytes == runner.weight_bytes > 199 * 96 * 4
    with caplog.at_level(logging.INFO):
        log_start(StartClock(), list(rows.values()), runner)
    assert "1,024 tokens: 4.00 requests of 256" in caplog.text
    assert f"{runner.num_programs} programs" in caplog.text


def test_the_largest_program_tells_what_activations_take(engine_of):
    runner = engine_of().runner
    signature = next(s for s in runner._signatures() if s.name == "head_greedy")
    compiled = signature.compile()
    analysis = compiled.memory_analysis()
    rows = {row.what: row for row in memory_rows(runner, runner.geometry, [compiled])}
    assert rows["activations"].num_bytes >= 2 * analysis.temp_size_in_bytes
