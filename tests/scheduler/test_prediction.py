"""The closed form of a step's time against the events it stands for."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from neojax.scheduler.corrections import BOUND, Corrections
from neojax.scheduler.plan import Mode, Prediction
from neojax.scheduler.prediction import LayerTimes, Load, Predictor, layer_period, paper_period
from tests.scheduler.tables import make_tables

seconds = st.floats(0, 10, allow_subnormal=False)
layer_times = st.builds(LayerTimes, *[seconds] * 7)


def last_event(t: LayerTimes, num_layers: int) -> float:
    """Every stage of every layer on its queue, in launch order; the time when all is done."""
    device = host = down = up = 0.0
    joined0 = joined1 = 0.0  # when the host's attention of the layer before is there
    stored = [0.0, 0.0]  # the staging ring: a layer's copies reuse those of two layers before
    fetched = [0.0, 0.0]
    for layer in range(num_layers):
        device = max(device, joined0, stored[layer % 2], fetched[layer % 2]) + t.linear0
        host = max(host, device) + t.host0
        joined0 = host
        down = stored[layer % 2] = max(down, device) + t.copies_down
        up = fetched[layer % 2] = max(up, device) + t.copies_up
        device += t.attention0
        device = max(device, joined1) + t.linear1
        host = max(host, device) + t.host1
        joined1 = host
    return max(device, host, down, up)


@given(t=layer_times)
def test_the_steady_state_is_what_the_events_settle_to(t: LayerTimes):
    grown = (last_event(t, 600) - last_event(t, 200)) / 400
    assert grown == pytest.approx(layer_period(t), rel=1e-2, abs=1e-6)


@given(t=layer_times, num_layers=st.integers(1, 80))
def test_a_step_takes_the_steady_state_and_at_most_one_layer_to_fill_and_empty(t, num_layers):
    steady = num_layers * layer_period(t)
    assert last_event(t, num_layers) <= steady + sum(t) + 1e-9


@given(t=layer_times)
def test_the_papers_formula_is_the_case_without_shared_slack(t: LayerTimes):
    t = t._replace(copies_down=0.0, copies_up=0.0)
    assert layer_period(t) <= paper_period(t) + 1e-9

    def meeting() -> float:  # both lanes start each stage together
        return max(t.linear0, t.host1) + max(t.attention0 + t.linear1, t.host0)

    assert paper_period(t) == meeting()


def test_the_two_agree_where_the_host_just_hides():
    t = LayerTimes(linear0=3.0, linear1=1.0, attention0=2.0, host0=3.0, host1=3.0)
    assert layer_period(t) == paper_period(t) == 6.0


def test_a_device_only_step_is_the_sum_of_its_parts():
    tables = make_tables()
    load = Load(chunks=((100, 100), (20, 220)), num_decodes=4, decode_context=2000)
    attention = (
        tables.prefill_attention(100, 100)
        + tables.prefill_attention(20, 220)
        + tables.device_decode(4, 2000)
    )
    layer = tables.linear[Mode.DEVICE_ONLY](124) + attention
    expected = tables.num_layers * layer + tables.per_step[Mode.DEVICE_ONLY](124)
    assert Predictor(tables).seconds(Mode.DEVICE_ONLY, load) == pytest.approx(expected)


@given(
    rows=st.integers(1, 64), context=st.integers(64, 100_000), chunk=st.integers(1, 2000),
)  # fmt: skip
def test_more_work_never_makes_a_step_shorter(rows: int, context: int, chunk: int):
    predictor = Predictor(make_tables())
    b0 = Load(chunks=((chunk, chunk),), num_decodes=4, decode_context=2000)
    b1 = Load(num_host_rows=rows, host_context=context)
    step = predictor.seconds(Mode.PIPELINED, b0, b1)
    assert step >= predictor.seconds(Mode.PIPELINED, b0)
    for more in (b1._replace(num_host_rows=rows + 1), b1._replace(host_context=2 * context)):
        assert predictor.seconds(Mode.PIPELINED, b0, more) >= step
    assert predictor.seconds(Mode.PIPELINED, b0, b1, swap_in=50_000) >= step
    longer = b0._replace(chunks=((chunk + 50, chunk + 50),))
    assert predictor.seconds(Mode.PIPELINED, longer, b1) >= step


def predicted(step_s: float, host_attention_s: float = 0.0) -> Prediction:
    return Prediction(
        step_s=step_s, linear_s=0, device_attention_s=0, host_attention_s=host_attention_s,
        hop_s=0, copies_s=0, per_step_s=0,
    )  # fmt: skip


@pytest.mark.parametrize("truth", [0.4, 1.0, 2.5])
def test_corrections_converge_to_the_true_ratio(truth: float):
    corrections = Corrections()
    for _ in range(200):
        step = predicted(corrections.step[Mode.PIPELINED], 2 * corrections.host_attention)
        corrections.observe(Mode.PIPELINED, step, truth, 2 * truth)
    assert corrections.step[Mode.PIPELINED] == pytest.approx(truth, rel=0.01)
    assert corrections.host_attention == pytest.approx(truth, rel=0.01)
    assert corrections.step[Mode.DEVICE_ONLY] == 1.0


def test_what_waking_workers_takes_does_not_count_as_the_price_of_many_rows():
    """Half a second of steps with hardly any host work, which took three times what was said."""
    corrections = Corrections()
    for _ in range(50):
        corrections.observe(Mode.ROLLING, predicted(10e-3, 0.2e-3), 10e-3, 0.6e-3)
    assert corrections.host_attention < 1.1


def test_steps_whose_ends_are_seen_late_are_made_up_for_by_the_next():
    corrections = Corrections()
    factors = []
    for step in range(400):
        seen = 30e-3 if step % 2 else 4e-3
        corrections.observe(Mode.PIPELINED, predicted(17e-3 * corrections.step[Mode.PIPELINED]),
                            seen, 0.0)  # fmt: skip
        factors.append(corrections.step[Mode.PIPELINED])
    assert 0.95 < min(factors) <= max(factors) < 1.05


@given(observed=st.lists(st.floats(0, 1e6), max_size=60))
def test_corrections_are_bounded_whatever_is_measured(observed: list[float]):
    corrections = Corrections()
    for step_s in observed:
        corrections.observe(Mode.PIPELINED, predicted(1e-3, 1e-3), step_s, step_s)
        for factor in (*corrections.step.values(), corrections.host_attention):
            assert 1 / BOUND <= factor <= BOUND


def test_a_mode_that_does_not_run_is_forgiven():
    corrections = Corrections()
    for _ in range(50):
        corrections.observe(Mode.PIPELINED, predicted(1.0), 4.0, 0.0)
    assert corrections.step[Mode.PIPELINED] > 3
    for _ in range(2000):
        corrections.observe(Mode.DEVICE_ONLY, predicted(1.0), 1.0, 0.0)
    assert corrections.step[Mode.PIPELINED] < 1.1
