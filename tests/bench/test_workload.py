"""Workloads: the published lengths come out, and the same again for the same seed."""

from __future__ import annotations

import statistics

import pytest

from neojax.bench.workload import WORKLOADS, Lengths, parse_workload


@pytest.mark.parametrize(
    ("name", "mean_in", "median_in", "mean_out", "median_out"),
    [
        ("ac", 2048, 1469, 27.9, 13),
        ("azure-conv", 1155, 1020, 211, 129),
        ("osc", 372, 371, 45.3, 45),
        ("osc-normal", 372, 371, 45, 45),
    ],
)
def test_published_means_and_medians_come_out(name, mean_in, median_in, mean_out, median_out):
    drawn = WORKLOADS[name].draw(10_000, seed=1)
    # A straight line to a far maximum overstates a mean: the last percent of ac's outputs.
    assert statistics.mean(n.input for n in drawn) == pytest.approx(mean_in, rel=0.05)
    assert statistics.mean(n.output for n in drawn) == pytest.approx(mean_out, rel=0.4)
    assert statistics.median(n.input for n in drawn) == pytest.approx(median_in, rel=0.05)
    assert statistics.median(n.output for n in drawn) == pytest.approx(median_out, rel=0.05)


def test_osc_as_clipped_normals_is_the_draw_that_other_engines_were_measured_with():
    drawn = WORKLOADS["osc-normal"].draw(200, seed=0)
    assert sum(n.input for n in drawn) == 75_060
    assert sum(n.output for n in drawn) == 8_780


def test_synthetic_lengths_are_exact_or_within_their_spread():
    assert parse_workload("1000/100").draw(3, seed=0) == [Lengths(1000, 100)] * 3
    drawn = parse_workload("1000/100~0.1").draw(500, seed=0)
    assert min(n.input for n in drawn) in range(900, 910)
    assert max(n.input for n in drawn) in range(1090, 1101)
    assert min(n.output for n in drawn) in range(90, 92)
    assert {n.output for n in drawn} == set(range(90, 111))


def test_the_seed_decides():
    ac = WORKLOADS["ac"]
    assert ac.draw(50, seed=3) == ac.draw(50, seed=3) != ac.draw(50, seed=4)
    assert ac.draw(50, seed=3)[:10] == ac.draw(10, seed=3)


@pytest.mark.parametrize("text", ["acc", "1000", "0/5", "1000/100~2", "1000/100 ", ""])
def test_an_unknown_workload_is_refused_with_the_names(text: str):
    with pytest.raises(ValueError, match=r"ac, azure-conv, osc, osc-normal.*1000/100"):
        parse_workload(text)
