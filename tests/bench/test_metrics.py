"""Metrics: each figure against a run small enough to compute by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from neojax.bench.metrics import (
    Distribution,
    RequestRecord,
    median_of,
    summarise,
    window_rate,
)


def record(index: int, sent_s: float, *token_s: float, **fields: object) -> RequestRecord:
    return RequestRecord(index, 10, sent_s, list(token_s), is_finished=True, **fields)


def test_every_figure_of_two_requests():
    records = [record(0, 100.0, 101.0, 102.0, 104.0), record(1, 101.0, 104.0, token_on_host=[True])]
    summary = summarise(records, start_s=100.0)
    assert summary.seconds == 4
    assert summary.requests_per_s == 0.5
    assert summary.output_tokens_per_s == 1
    assert summary.total_tokens_per_s == 6
    assert summary.s_per_output_token == pytest.approx((4 / 3 + 3) / 2)
    assert summary.host_share == 0.25
    assert summary.ttft_s.mean == 2
    assert summary.tpot_s.p50 == 1.5  # the request of one token has none
    assert summary.itl_s.mean == 1.5
    assert summary.itl_s.p99 == pytest.approx(1.99)
    assert summary.e2e_s.p90 == pytest.approx(3.9)


def test_tokens_of_requests_cut_off_count_where_the_run_has_settled():
    done = record(0, 0.0, 1.0, 5.0, 9.0)
    cut = RequestRecord(1, 10, 0.0, [2.0, 6.0, 8.0], error="cut off")
    # 5, 6, 8 and 9 of the last 6 seconds.
    assert summarise([done, cut], start_s=0.0).settled_tokens_per_s == pytest.approx(4 / 6)


def test_each_side_has_its_own_time_per_token():
    """A request that moved counts on either side, each token where its row was."""
    device = record(0, 0.0, 1.0, 2.0, 3.0, token_on_host=[False] * 3)
    host = record(1, 0.0, 1.0, 6.0, token_on_host=[True, True])
    moved = record(2, 0.0, 1.0, 8.0, 10.0, 13.0, token_on_host=[True, True, False, False])
    summary = summarise([device, host, moved], start_s=0.0)
    assert summary.device_tpot_s.mean == pytest.approx((1 + 2.5) / 2)
    assert summary.host_tpot_s.p50 == pytest.approx(6)
    assert summary.host_share == pytest.approx(4 / 9)
    unknown = summarise([record(0, 0.0, 1.0, 2.0)], start_s=0.0)
    assert unknown.host_tpot_s is None


def test_warm_up_leaves_out_the_first_sent_and_the_first_completed():
    # The second sent completes first.
    records = [record(0, 0.0, 9.0), record(1, 0.0, 4.0), record(2, 5.0, 12.0)]
    summary = summarise(records, start_s=0.0, warm_up=1)
    assert summary.num_requests == 2
    assert summary.seconds == 8
    assert summary.ttft_s.mean == 5.5  # of the second and third sent
    with pytest.raises(ValueError, match="dropping 3 leaves none"):
        summarise(records, start_s=0.0, warm_up=3)


def test_cool_down_leaves_the_last_completions_out_of_rates_only():
    records = [record(i, 0.0, t) for i, t in enumerate((1.0, 2.0, 3.0, 30.0))]
    summary = summarise(records, start_s=0.0, cool_down=1)
    assert summary.requests_per_s == 1
    assert summary.e2e_s.mean == 9
    with pytest.raises(ValueError, match="dropping 4 leaves none"):
        summarise(records, start_s=0.0, warm_up=1, cool_down=3)


def test_requests_that_failed_or_never_finished_are_counted_and_left_out():
    unfinished = RequestRecord(1, 10, 0.0, [1.0])
    records = [record(0, 0.0, 2.0), unfinished, record(2, 0.0, error="refused")]
    summary = summarise(records, start_s=0.0)
    assert (summary.num_requests, summary.num_errors) == (1, 2)
    assert summary.output_tokens == 1


def test_the_window_rate_sees_only_the_middle():
    steady = [float(i) for i in range(10)]
    assert window_rate(steady) == 1
    slow_ends = [0, 50, 98, *steady[3:7], 100, 200, 300]
    slow_ends[2] = 2.0
    assert window_rate(slow_ends) == 1
    assert math.isnan(window_rate([1.0, 2.0]))
    assert math.isnan(window_rate([1.0] * 10))


def test_percentiles_are_numpys_and_nothing_gives_nan():
    values = np.random.default_rng(0).exponential(size=101).tolist()
    d = Distribution.of(values)
    assert d.p50 == sorted(values)[50]
    assert d.p90 == sorted(values)[90]
    assert math.isnan(Distribution.of([]).p99)


def test_the_median_over_repeats_is_taken_figure_by_figure():
    runs = [summarise([record(0, 0.0, t, t + 1)], start_s=0.0) for t in (1.0, 5.0, 2.0)]
    median = median_of(runs)
    assert median.ttft_s.mean == 2
    assert median.requests_per_s == pytest.approx(1 / 3)
