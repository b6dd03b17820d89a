"""The simulated engine, and the commands around it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from neojax.bench.arrivals import make_traffic
from neojax.bench.driver import drive
from neojax.bench.measure import measure
from neojax.bench.workload import parse_workload
from neojax.plan import __main__ as planner
from neojax.plan import simulate
from neojax.plan.engine import SimulatedEngine
from neojax.plan.machine import MACHINES
from neojax.plan.model_sizes import MODELS
from neojax.plan.roofline import Roofline
from neojax.plan.scenario import Limits, Scenario, describe, with_rolling
from neojax.sampling_params import SamplingParams
from neojax.scheduler.costs import CostTables
from neojax.scheduler.plan import Mode


def scenario(device_kv_tokens: int = 4000, machine: str = "h200") -> Scenario:
    return describe(MACHINES[machine], MODELS["llama-3.1-8b"], device_kv_tokens=device_kv_tokens)


@pytest.mark.parametrize("policy", ["device-only", "auto", "full", "rolling"])
def test_every_request_gets_all_its_tokens_in_order(policy: str):
    point = scenario(device_kv_tokens=864)  # two requests: here auto needs the host
    traffic = make_traffic(parse_workload("osc"), "poisson:20", 40, seed=1)
    engine = SimulatedEngine(point.limits, policy, point.tables)
    run = drive(engine, traffic, clock=engine.clock)
    for record, lengths in zip(run.records, traffic.lengths, strict=True):
        assert record.output_tokens == lengths.output
        assert record.token_s == sorted(record.token_s)
        assert record.token_s[0] > record.sent_s
        assert all(record.token_on_host) or policy != "full"
    engine.scheduler.check_integrity()
    stats = engine.stats()
    if policy == "auto":
        return  # it decides for itself
    assert (stats.steps_rolling > 0) == (policy == "rolling")
    assert (stats.requests_placed_host > 0) == (policy != "device-only")
    assert (stats.host_s > 0) == (policy != "device-only")
    assert stats.steps_pipelined > 0 or policy != "full"


def test_time_is_the_steps_time_when_there_is_always_work():
    point = scenario()
    engine = SimulatedEngine(point.limits, "device-only", point.tables)
    for i in range(6):
        engine.add_request(str(i), [0] * 300, SamplingParams(max_tokens=20, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert engine.stats().device_s == pytest.approx(engine.clock.now_s())


def test_auto_has_rolling_steps_only_where_they_are_asked_for_and_cheap():
    traffic = make_traffic(parse_workload("1000/100"), "closed:96", 120, seed=0)
    point = scenario(device_kv_tokens=8000)  # in 4000 tokens, PIPELINED steps are better
    # Long enough for a token in 34 steps.
    limits = dataclasses.replace(point.limits, tpot_slo_s=1.0)

    def rolling_steps(hop_us: float, *, rolls: bool) -> int:
        tables = with_rolling(point.tables, hop_us / 1e6)
        run = Scenario(tables, limits, rolls).run("auto", traffic)
        return run.counters.steps_rolling

    assert rolling_steps(10, rolls=True) > 100
    assert rolling_steps(10, rolls=False) == 0
    assert rolling_steps(1000, rolls=True) == 0


def test_tables_without_rolling_steps_cannot_simulate_them():
    point = scenario()
    linear = {mode: t for mode, t in point.tables.linear.items() if mode is not Mode.ROLLING}
    point = dataclasses.replace(point, tables=dataclasses.replace(point.tables, linear=linear))
    traffic = make_traffic(parse_workload("200/10"), "all", 60, seed=0)
    assert point.run("full", traffic).summary.num_errors == 0
    with pytest.raises(ValueError, match="know no steps of mode rolling"):
        point.run("rolling", traffic)


def test_a_simulation_is_the_same_every_time():
    traffic = make_traffic(parse_workload("ac"), "all", 30, seed=0)
    assert scenario(16_000).run("auto", traffic) == scenario(16_000).run("auto", traffic)


def test_measured_device_only_throughput_comes_out():
    """H200, 8B, all at once: 32.3 requests/s of 1000/100 uncapped, 15.9 in 16,000 tokens."""
    for limit, count, measured in ((None, 256, 32.3), (16_000, 96, 15.9)):
        point = describe(
            MACHINES["h200"],
            MODELS["llama-3.1-8b"],
            device_kv_tokens=limit,
            limits=Limits(max_num_batched_tokens=4096),
        )
        traffic = make_traffic(parse_workload("1000/100"), "all", count, seed=0)
        rate = point.run("device-only", traffic).summary.requests_per_s
        assert rate == pytest.approx(measured, rel=0.12)


def test_more_kv_than_the_device_has_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"10000000 tokens of KV take 13.*GB"):
        scenario(10_000_000)
    with pytest.raises(ValueError, match="no room for KV cache"):
        describe(MACHINES["h200"], MODELS["llama-3.1-8b"], device_kv_tokens=0, host_kv_tokens=0)


def test_policies_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "result.json"
    command = "--machine h200 --device-kv-tokens 4000 --workload 200/20 --num-requests 20"
    policies = ["--policies", "device-only,full", "--output", str(output)]
    assert simulate.main([*command.split(), *policies]) == 0
    printed = capsys.readouterr().out
    assert "flops 0.7, attention_flops 0.25" in printed
    assert "| device-only |" in printed
    result = json.loads(output.read_text())
    assert result["full"]["counters"]["requests_placed_host"] == 20
    assert result["full"]["host_share"] > result["device-only"]["host_share"] == 0


def test_measured_tables_stand_in_for_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "tables.json"
    tables = Roofline(MACHINES["h200"], MODELS["llama-3.1-8b"]).tables(2048, 4000)
    file.write_text(tables.to_json())
    command = ["--tables", str(file), "--workload", "200/20", "--num-requests", "20"]
    assert simulate.main([*command, "--device-kv-tokens", "4000", "--host-kv-tokens", "0"]) == 0
    assert f"measured tables {file}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="needs --device-kv-tokens and --host-kv-tokens"):
        simulate.main(command)
    file.write_text("{}")
    with pytest.raises(SystemExit, match="not a set of cost tables"):
        simulate.main([*command, "--device-kv-tokens", "4000", "--host-kv-tokens", "0"])


def test_a_plan_says_what_fits_and_what_wins(capsys: pytest.CaptureFixture[str]):
    command = "llama-2-7b --machine t4-g4dn.4xlarge --device-kv-tokens 864 --max-model-len 832"
    assert planner.main([*command.split(), "--workload", "osc", "--num-requests", "40"]) == 0
    printed = capsys.readouterr().out
    assert "weights 13.5 GB of 16; KV cache 512 KiB a token" in printed
    assert "device       864 tokens" in printed
    assert "The host helps: auto serves" in printed
    assert planner.main("llama-3.1-8b --num-requests 20".split()) == 0  # noqa: SIM905
    assert "The host makes no difference" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="neither a JSON file nor one of"):
        planner.main(["llama-3.1-8b", "--machine", "none"])


def test_auto_stays_near_device_only_where_steps_with_host_rows_take_twice_what_it_believes():
    believed = describe(MACHINES["h200"], MODELS["llama-3.1-8b"], device_kv_tokens=4000)
    tables = believed.tables
    pipelined = tables.linear[Mode.PIPELINED]
    twice = dataclasses.replace(pipelined, ys=tuple(2 * y for y in pipelined.ys))
    true = dataclasses.replace(tables, linear=tables.linear | {Mode.PIPELINED: twice})
    traffic = make_traffic(parse_workload("osc"), "closed:60", 200, 0)

    def rate(policy: str, costs: CostTables) -> tuple[float, int]:
        engine = SimulatedEngine(believed.limits, policy, costs, believed=tables)
        result = measure(engine, traffic, seed=0, warm_up=60, clock=engine.clock)
        return result.summary.requests_per_s, result.counters.steps_pipelined

    alone, _ = rate("device-only", true)
    as_believed, _ = rate("auto", tables)
    mistaken, num_tried = rate("auto", true)
    assert as_believed > 1.1 * alone
    assert num_tried > 0
    assert mistaken > 0.9 * alone
