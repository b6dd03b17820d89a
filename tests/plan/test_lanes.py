"""Step times on two lanes: bounds that hold for any plan, and the scheduler's closed form."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given

from neojax.plan.lanes import StepTimes, rolling_step_times, step_times
from neojax.plan.machine import MACHINES
from neojax.plan.model_sizes import MODELS
from neojax.plan.roofline import Roofline
from neojax.sampling_params import SamplingParams
from neojax.scheduler.plan import Mode, Plan, Row, SubBatch, Swap
from neojax.scheduler.prediction import Load, Predictor
from neojax.scheduler.request import Placement, Progress, Request

TABLES = Roofline(MACHINES["a10g-g5.8xlarge"], MODELS["llama-3.1-8b"]).tables(2048, 400_000)


def row(num_tokens: int, start: int, placement: Placement) -> Row:
    request = Request("r", [0], SamplingParams(), 1, frozenset(), 0, 0)
    return Row(request, Progress(start, 0), num_tokens, True, 0, placement, 0, ())


contexts = st.lists(st.integers(1, 5000), max_size=30)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sides = st.sampled_from(Placement)
    chunk = st.builds(row, st.integers(1, 600), st.integers(0, 4000), sides)
    b0 = SubBatch(
        tuple(draw(st.lists(chunk, max_size=3))),
        tuple(row(1, n, Placement.DEVICE) for n in draw(contexts)),
        tuple(row(1, n, Placement.HOST) for n in draw(contexts)),
    )
    b1 = SubBatch(host_decodes=tuple(row(1, n, Placement.HOST) for n in draw(contexts)))
    if not b0:
        b0, b1 = b1, b0
    needs_host = b0.host_chunks or b0.host_decodes or b1
    return Plan(1, Mode.PIPELINED if needs_host else Mode.DEVICE_ONLY, b0, b1)


@given(plans())
def test_a_step_takes_no_less_than_each_lanes_work_and_no_more_than_all_of_it(plan: Plan):
    times = step_times(plan, TABLES)
    store = TABLES.num_layers * TABLES.store(sum(r.num_tokens for r in plan.b0.host_chunks))
    fetch = TABLES.num_layers * TABLES.fetch(sum(r.start.token for r in plan.b0.host_chunks))
    slack = 1e-9
    assert times.seconds >= max(times.device_s, times.host_s, store, fetch) - slack
    assert times.seconds <= times.device_s + times.host_s + store + slack


@given(plans())
def test_the_schedulers_closed_form_predicts_it_but_for_filling_and_draining(plan: Plan):
    layers = 400  # so many that the ends vanish
    tables = dataclasses.replace(TABLES, num_layers=layers)
    loads = Load.of(plan.b0), Load.of(plan.b1)
    predicted = Predictor(tables).predict(plan.mode, *loads, plan.swaps).step_s
    assert step_times(plan, tables).seconds == pytest.approx(predicted, rel=0.02)


def test_without_host_rows_a_step_is_its_device_work():
    decodes = tuple(row(1, 999, Placement.DEVICE) for _ in range(8))
    times = step_times(Plan(1, Mode.DEVICE_ONLY, SubBatch(decodes=decodes)), TABLES)
    layer = TABLES.linear[Mode.DEVICE_ONLY](8) + TABLES.device_decode(8, 8000)
    seconds = 32 * layer + TABLES.per_step[Mode.DEVICE_ONLY](8)
    assert times == StepTimes(pytest.approx(seconds), pytest.approx(seconds), 0.0)


def test_swaps_run_beside_a_step_until_the_link_is_what_it_waits_for():
    decodes = SubBatch(decodes=(row(1, 99, Placement.DEVICE),))
    plain = Plan(1, Mode.DEVICE_ONLY, decodes)

    def with_swap(num_tokens: int) -> float:
        swap = Swap(decodes.decodes[0].request, Placement.HOST, num_tokens, (), ())
        return step_times(dataclasses.replace(plain, swaps=(swap,)), TABLES).seconds

    alone = step_times(plain, TABLES).seconds
    assert with_swap(100) == alone
    copy = TABLES.num_layers * TABLES.swap_out(100_000)
    assert with_swap(100_000) == pytest.approx(copy, rel=0.1)


def test_a_rolling_step_is_its_longer_lane():
    b0 = Load(num_decodes=8, decode_context=8000)
    layer = TABLES.linear[Mode.ROLLING](8 + 4) + TABLES.device_decode(8, 8000)
    device = 32 * layer + TABLES.per_step[Mode.ROLLING](8 + 4)
    idle = rolling_step_times(b0, 4, [(0, 0)] * 32, TABLES)
    assert idle == (pytest.approx(device), pytest.approx(device), 0)
    groups = [(4, 100_000)] * 32
    busy = rolling_step_times(b0, 4, groups, TABLES)
    host = 32 * TABLES.host_decode(4, 100_000)
    assert busy.host_s == pytest.approx(host)
    assert busy.seconds == pytest.approx(host)  # also while the head is computed

    moved = row(20_000, 0, Placement.HOST).request
    swap = Swap(moved, Placement.HOST, 20_000, (), ())
    swapping = rolling_step_times(b0, 4, [(0, 0)] * 32, TABLES, [swap])
    ends = TABLES.per_step[Mode.ROLLING](12)
    assert swapping.seconds == pytest.approx(32 * TABLES.swap_out(20_000) + ends)
    assert swapping.seconds > idle.seconds
    predicted = Predictor(TABLES).predict_rolling(b0, 4, [], swaps=[swap])
    assert predicted.step_s == pytest.approx(swapping.seconds)
