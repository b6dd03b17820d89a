"""Totals of steps, as metrics show them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from neojax.engine.history import StepRecord
from neojax.engine.meters import Meters
from neojax.sampling_params import SamplingParams
from neojax.scheduler.plan import Mode, Plan, Prediction, Row, SubBatch, Swap
from neojax.scheduler.request import START, Placement, Request

DEVICE_STEP = StepRecord(
    step=1,
    mode=Mode.DEVICE_ONLY,
    reason="",
    num_chunk_tokens=100,
    num_device_decodes=3,
    num_host_rows=(0, 0),
    num_under_way=0,
    predicted=None,
    step_s=0.5,
    host_attention_s=0.0,
    moves=(),
)


def plan(*swaps: Swap) -> Plan:
    return Plan(1, Mode.DEVICE_ONLY, SubBatch(), swaps=swaps)


def predicted(step_s: float, device_only_s: float | None) -> Prediction:
    terms = [f.name for f in dataclasses.fields(Prediction)]
    return Prediction(
        **dict.fromkeys(terms, 0.0) | {"step_s": step_s, "device_only_s": device_only_s}
    )


def row(name: str, *, samples: bool) -> Row:
    request = Request(name, [1, 2], SamplingParams(), 4, frozenset(), 0, 0)
    return Row(request, START, 1, samples, 0, Placement.DEVICE, 0, (0,))


def with_host_rows(**changes: Any) -> StepRecord:
    changes = {"mode": Mode.PIPELINED, "num_host_rows": (2, 5), "host_attention_s": 0.3} | changes
    return dataclasses.replace(DEVICE_STEP, **changes)


def test_time_tokens_and_idle_host_lanes_add_up():
    meters = Meters(token_bytes=10)
    meters.completed(plan(), DEVICE_STEP)
    meters.completed(plan(), with_host_rows())
    totals = meters.totals()
    assert totals.seconds == {"device_only": 0.5, "pipelined": 0.5}
    assert totals.host_idle_s == pytest.approx(0.2)
    assert totals.tokens.total == 103 + 110
    assert sum(totals.tokens.counts) == 2
    assert totals.tokens.counts[totals.tokens.bounds.index(128)] == 2
    assert sum(totals.relative_error.counts) == 0
    assert totals.predicted_gain is None


def test_gains_and_errors_are_of_predicted_steps():
    meters = Meters(token_bytes=10)
    meters.completed(plan(), dataclasses.replace(DEVICE_STEP, predicted=predicted(0.6, None)))
    meters.completed(plan(), with_host_rows(predicted=predicted(0.4, 0.8)))
    meters.completed(plan(), with_host_rows(predicted=predicted(0.4, 0.8)))
    totals = meters.totals()
    assert totals.predicted_gain == pytest.approx(2.0)
    assert totals.measured_gain == pytest.approx(1.6)
    assert totals.relative_error.total == pytest.approx(0.6)
    assert totals.relative_error.counts[totals.relative_error.bounds.index(0.2)] == 3


def test_swapped_bytes_are_counted_by_direction():
    meters = Meters(token_bytes=10)
    request: Any = None
    out = Swap(request, Placement.HOST, 7, (1,), (2,))
    back = Swap(request, Placement.DEVICE, 3, (2,), (1,))
    meters.completed(plan(out, back), DEVICE_STEP)
    meters.completed(plan(out), DEVICE_STEP)
    assert meters.totals().swap_bytes == {"out": 140, "in": 30}


def test_requests_wait_until_their_first_step_and_then_for_their_first_token():
    meters = Meters(token_bytes=10)
    for name in "abc":
        meters.arrived(name)
    meters.ended("c")
    chunk = Plan(1, Mode.DEVICE_ONLY, SubBatch(chunks=(row("a", samples=False),)))
    last_chunks = (row("a", samples=True), row("b", samples=True))
    both = Plan(2, Mode.DEVICE_ONLY, SubBatch(chunks=last_chunks))
    meters.launched(chunk)
    assert sum(meters.totals().queue_s.counts) == 1
    meters.completed(chunk, DEVICE_STEP)
    assert sum(meters.totals().prefill_s.counts) == 0
    meters.launched(both)
    meters.completed(both, DEVICE_STEP)
    meters.launched(both)
    totals = meters.totals()
    assert sum(totals.queue_s.counts) == sum(totals.prefill_s.counts) == 2
    assert totals.queue_s.total >= 0
