"""Arrivals: rates and burstiness as asked for, traces as recorded."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from neojax.bench.arrivals import make_traffic
from neojax.bench.workload import Lengths, parse_workload

OSC = parse_workload("osc")


@pytest.mark.parametrize(("form", "cv"), [("poisson:5", 1.0), ("gamma:5:3", 3.0)])
def test_random_gaps_have_the_rate_and_the_variation_asked_for(form: str, cv: float):
    traffic = make_traffic(OSC, form, 20_000, seed=0)
    assert traffic.at_s is not None
    assert traffic.at_s[0] == 0
    gaps = [b - a for a, b in itertools.pairwise(traffic.at_s)]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 5, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.05)


def test_arrivals_do_not_change_the_lengths():
    assert (
        make_traffic(OSC, "poisson:5", 9, seed=2).lengths
        == make_traffic(OSC, "closed:3", 9, seed=2).lengths
        == tuple(OSC.draw(9, seed=2))
    )


def test_a_closed_loop_has_clients_and_no_times():
    closed, burst = (make_traffic(OSC, form, 4, seed=0) for form in ("closed:3", "all"))
    assert (closed.clients, closed.at_s) == (3, None)
    assert (burst.clients, burst.at_s) == (None, (0, 0, 0, 0))


def test_a_steady_loop_begins_with_requests_under_way():
    closed, steady = (make_traffic(OSC, f"{form}:3", 9, seed=2) for form in ("closed", "steady"))
    assert (steady.clients, steady.at_s) == (3, None)
    assert steady.lengths[3:] == closed.lengths[3:]
    for ours, whole in zip(steady.lengths[:3], closed.lengths, strict=False):
        assert ours.input == whole.input
        assert 1 <= ours.output <= whole.output
    assert steady.lengths[:3] != closed.lengths[:3]
    assert steady == make_traffic(OSC, "steady:3", 9, seed=2)


def test_azures_csv_is_replayed(tmp_path: Path):
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:05.0000000,4808,10\n"
        "2023-11-16 18:17:03.9799600,3180,8\n"
    )
    traffic = make_traffic(OSC, f"trace:{file}", 100, seed=0)
    assert traffic.lengths == (Lengths(3180, 8), Lengths(4808, 10))
    assert traffic.at_s == pytest.approx((0, 1.02004))


def test_mooncakes_json_lines_are_replayed_and_cut_to_the_count(tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    row = '{{"timestamp": {}, "input_length": {}, "output_length": {}, "hash_ids": []}}\n'
    file.write_text("".join(row.format(1000 + 500 * i, 10 + i, i) for i in range(5)))
    traffic = make_traffic(OSC, f"trace:{file}", 3, seed=0)
    assert traffic.lengths == ((10, 1), (11, 1), (12, 2))  # a request without output is none
    assert traffic.at_s == (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    "text", ["", "closed", "closed:0", "closed:1.5", "poisson:0", "poisson:x", "gamma:1", "all:3"]
)
def test_other_arrivals_are_refused_with_the_forms(text: str):
    with pytest.raises(ValueError, match="closed:CLIENTS, poisson:RATE"):
        make_traffic(OSC, text, 5, seed=0)


def test_a_trace_that_is_none_is_refused_with_what_it_lacks(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be read"):
        make_traffic(OSC, f"trace:{tmp_path / 'none.csv'}", 5, seed=0)
    for name, text in (("a.csv", "a,b\n1,2\n"), ("a.jsonl", "{}\n"), ("b.jsonl", "[1]\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="neither"):
            make_traffic(OSC, f"trace:{tmp_path / name}", 5, seed=0)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="no requests"):
        make_traffic(OSC, f"trace:{tmp_path / 'empty.jsonl'}", 5, seed=0)
