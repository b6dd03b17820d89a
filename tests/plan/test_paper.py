"""The paper's points: that they are all there, and that a latency bound is met where it crosses."""

from __future__ import annotations

import dataclasses

import pytest

from neojax.bench.arrivals import make_traffic
from neojax.bench.workload import parse_workload
from neojax.plan import paper


def test_every_point_has_a_setup_that_fits_its_machine():
    points = [point for points in paper.POINTS.values() for point in points]
    assert len(points) == 3 + 4 * 5 + 3 * 5
    for machine in {point.machine for point in points}:
        limits = paper.SETUPS[machine].scenario(machine).limits
        assert limits.num_host_blocks > limits.num_device_blocks


def test_largest_gains_of_figure_10a_are_the_papers():
    gains = {}
    for point in paper.FIGURE_10A:
        gains[point.machine] = max(point.gain, gains.get(point.machine, 0))
    assert list(gains.values()) == [1.12, 1.13, 1.295, 1.79]


def test_the_rate_under_a_bound_is_where_latency_crosses_it():
    point = dataclasses.replace(paper.FIGURE_6[0], bound_s=0.2)
    scenario = paper.SETUPS[point.machine].scenario(point.machine)
    rate = paper.rate_under(scenario, "full", point, num_requests=60, seed=0)

    def latency(of: float) -> float:
        traffic = make_traffic(parse_workload(point.workload), f"poisson:{of}", 60, seed=0)
        return scenario.run("full", traffic, warm_up=15).summary.s_per_output_token

    assert latency(rate) <= 0.2 < latency(1.05 * rate)


def test_too_few_requests_to_reach_a_bound_are_said_so():
    point = dataclasses.replace(paper.FIGURE_6[0], bound_s=100.0)
    scenario = paper.SETUPS[point.machine].scenario(point.machine)
    with pytest.raises(ValueError, match="try --num-requests 40"):
        paper.rate_under(scenario, "full", point, num_requests=20, seed=0)


def test_hosts_in_another_order_than_the_papers_are_named():
    small, large = (
        next(p for p in paper.FIGURE_10A if p.machine == f"a10g-g5.{size}xlarge" and p.gain > 1.1)
        for size in (4, 8)
    )
    assert small.workload == large.workload
    outcomes = [paper.Outcome(small, 2.0, 2.8), paper.Outcome(large, 2.0, 2.6)]
    (line,) = paper.misordered(outcomes)
    assert line.startswith("1000/100~0.1: a10g-g5.4xlarge 1.400, a10g-g5.8xlarge 1.300; ")
    assert not list(paper.misordered(outcomes[:1]))
    assert [bool(outcome.likely_cause) for outcome in outcomes] == [True, False]


def test_an_unknown_figure_is_refused_with_the_names():
    with pytest.raises(SystemExit, match="figures are 6, 10a, t4, not 9"):
        paper.main(["--figures", "9"])
