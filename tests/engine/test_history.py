"""What the engine tells of its steps and its requests."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import jax
import pytest

from neojax.config import EngineConfig
from neojax.engine.build import _request_log
from neojax.engine.history import NUM_STEPS, History
from neojax.engine.request_log import RequestLog
from neojax.scheduler.costs import CostTables, Table1, Table2
from neojax.scheduler.plan import Mode, Plan, Prediction, SubBatch
from neojax.scheduler.policy import load_policy
from neojax.scheduler.scheduler import Scheduler
from tests.engine.tiny import BASE, GREEDY, mixed_requests, run_all

LINE = Table1((1, 1000), (1e-6, 1e-3))
PLANE = Table2((1, 1000), (1, 1000), ((1e-6, 1e-5), (1e-4, 1e-3)))
TABLES = CostTables(
    num_layers=BASE.num_layers,
    linear=dict.fromkeys(Mode, LINE),
    prefill_attention=PLANE,
    device_decode=PLANE,
    host_decode=PLANE,
    hop=LINE,
    store=LINE,
    fetch=LINE,
    swap_out=LINE,
    swap_in=LINE,
    per_step=dict.fromkeys(Mode, LINE),
)


def make_plan(step: int, step_s: float = 1e-9, device_only_s: float | None = None) -> Plan:
    prediction = Prediction(
        step_s=step_s, linear_s=0, device_attention_s=0, host_attention_s=0, hop_s=0, copies_s=0,
        per_step_s=0, device_only_s=device_only_s,
    )  # fmt: skip
    return Plan(step, Mode.PIPELINED, SubBatch(), prediction=prediction)


def test_every_step_is_explained(engine_of):
    engine = engine_of(limit=12)
    before = {record.step for record in engine.explain()}  # other tests share the engine
    run_all(engine, mixed_requests(6, seed=2))
    records = [record for record in engine.explain() if record.step not in before]
    assert records
    assert [r.step for r in records] == list(range(records[0].step, records[-1].step + 1))
    assert all(r.step_s > 0 for r in records)
    started = {m.request_id for r in records for m in r.moves if m.reason == "starts"}
    assert started == {str(i) for i in range(6)}
    host = [r for r in records if sum(r.num_host_rows)]
    assert host
    assert sum(r.host_attention_s for r in records) > 0
    assert engine.explain(2) == records[-2:]
    for record in records:
        assert record.mode.value in str(record)


def test_measured_steps_correct_the_predictions(engine_of):
    engine = engine_of()
    plain = engine.scheduler
    engine.scheduler = Scheduler(plain.limits, load_policy("auto"), TABLES)
    try:
        # One side after the other: a step counts only between steps of its own mode.
        for side in ("device", "host"):
            run_all(
                engine,
                [
                    (prompt, dataclasses.replace(params, kv_placement=side))
                    for prompt, params in mixed_requests(4, seed=2)
                ],
            )
        stats = engine.stats()
        for factor in (
            stats.correction_device_only,
            stats.correction_pipelined,
            stats.correction_host_attention,
        ):
            assert factor != 1.0
            assert 0.25 <= factor <= 4.0
        assert all(r.predicted is not None for r in engine.explain(5))
        assert "predicted" in str(engine.explain(1)[0])
    finally:
        engine.scheduler = plain


def test_steps_that_the_device_alone_would_have_won_are_counted():
    history = History()
    history.add(make_plan(1, device_only_s=1e9), launched_s=0.0, host_busy_s=0.0)
    assert history.num_lost_steps == 0
    record = history.add(make_plan(2, device_only_s=0.0), launched_s=0.0, host_busy_s=0.25)
    assert record.host_attention_s == 0.25
    assert history.num_lost_steps == 1
    assert history.lost_s == record.lost_s == record.step_s > 0
    history.add(make_plan(3), launched_s=0.0, host_busy_s=0.25)
    assert history.num_lost_steps == 1  # nothing to compare with


def test_old_steps_are_forgotten():
    history = History()
    for step in range(NUM_STEPS + 10):
        history.add(make_plan(step), launched_s=0.0, host_busy_s=0.0)
    assert [r.step for r in history.last()] == list(range(10, NUM_STEPS + 10))


def test_a_failed_step_puts_the_steps_before_it_into_the_log(engine_of, monkeypatch, caplog):
    engine = engine_of()
    engine._steps_since_failure = 100
    run_all(engine, mixed_requests(2))
    enqueue = engine.runner.enqueue

    def fail_once(plan):
        monkeypatch.setattr(engine.runner, "enqueue", enqueue)
        raise jax.errors.JaxRuntimeError("INTERNAL: injected")

    monkeypatch.setattr(engine.runner, "enqueue", fail_once)
    with caplog.at_level(logging.ERROR):
        run_all(engine, mixed_requests(2))
    assert "injected; the steps before:" in caplog.text
    assert "device_only: " in caplog.text


def test_each_request_leaves_a_line(engine_of, tmp_path: Path):
    path = tmp_path / "requests.jsonl"
    engine = engine_of(limit=12)
    engine._request_log = RequestLog(path)
    try:
        requests = mixed_requests(5, seed=3)
        run_all(engine, requests)
        engine.add_request("gone", [1, 2, 3], dataclasses.replace(GREEDY, kv_placement="host"))
        engine.step()
        engine.abort("gone")
        while engine.has_work:
            engine.step()
    finally:
        engine._request_log.close()
        engine._request_log = RequestLog()
    lines = {e["request_id"]: e for e in map(json.loads, path.read_text().splitlines())}
    assert lines.keys() == {"0", "1", "2", "3", "4", "gone"}
    for index, (prompt, params) in enumerate(requests):
        line = lines[str(index)]
        assert line["prompt_tokens"] == len(prompt)
        assert line["output_tokens"] == params.max_tokens
        assert line["finish_reason"] == "length"
        assert 0 < line["first_token_s"] <= line["finished_s"]
        assert line["placement"] in ("device", "host")
        assert line["moves"][0]["reason"] == "starts"
    assert lines["gone"]["finish_reason"] == "abort"
    assert lines["gone"]["placement"] == "host"


def test_a_request_log_that_cannot_be_written_is_a_clear_error(tmp_path: Path):
    with pytest.raises(ValueError, match=r"--request-log .*no-such"):
        _request_log(EngineConfig(request_log=str(tmp_path / "no-such" / "file")))
