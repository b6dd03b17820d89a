"""The series of /metrics, the log lines, and what the process imports."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from neojax.engine.messages import Ready
from neojax.engine.report import EngineStats
from neojax.serve.stats_log import capacity_line, stats_line
from tests.serve.running_server import RunningServer, script, serving, wait_for

SERIES = {
    "num_requests_running": {"placement"},
    "num_requests_waiting": set(),
    "kv_cache_usage_perc": {"pool"},
    "num_kv_blocks": {"pool"},
    "num_preemptions": set(),
    "prompt_tokens": set(),
    "generation_tokens": set(),
    "iterations": {"mode"},
    "requests_placed": {"placement"},
    "compiles_after_ready": set(),
    "request_success": {"finished_reason"},
    "time_to_first_token_seconds": {"le"},
    "inter_token_latency_seconds": {"le"},
    "e2e_request_latency_seconds": {"le"},
    "request_prompt_tokens": {"le"},
    "request_generation_tokens": {"le"},
    "request_decode_time_seconds": {"le"},
    "request_time_per_output_token_seconds": {"le"},
    "request_params_n": {"le"},
    "request_params_max_tokens": {"le"},
    "lane_busy_seconds": {"lane"},
    "step_seconds": {"mode"},
    "pipeline_bubble_seconds": {"lane"},
    "kv_swap_bytes": {"direction"},
    "iteration_tokens_total": {"le"},
    "predictor_relative_error": {"le"},
    "request_queue_time_seconds": {"le"},
    "request_prefill_time_seconds": {"le"},
    "predicted_gain_ratio": set(),
    "measured_gain_ratio": set(),
    "host_attention_bytes": set(),
    "requests_not_finite": set(),
    "swaps": {"placement"},
    "iterations_lost": set(),
    "iterations_lost_seconds": set(),
    "predictor_ratio": {"term"},
}


def stats(**changes: float) -> EngineStats:
    fields: dict[str, float] = dict.fromkeys((f.name for f in dataclasses.fields(EngineStats)), 0)
    return EngineStats(**{**fields, **changes})  # type: ignore[arg-type]


def test_metrics_carry_the_promised_names_and_labels(server: RunningServer):
    server.complete("a")
    wait_for(lambda: "num_requests_running" in server.get("/metrics").text, "no statistics")
    families = {f.name: f for f in text_string_to_metric_families(server.get("/metrics").text)}
    for name, labels in SERIES.items():
        sample = families[f"neojax:{name}"].samples[0]
        assert set(sample.labels) == labels | {"model_name"}
        assert sample.labels["model_name"] == "tiny"


def test_counters_and_gauges_follow_the_requests(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path) as server:
        wait_for(lambda: "num_requests_running" in server.get("/metrics").text, "no statistics")
        assert server.complete(script(say="abc", host=True)).status_code == 200
        assert server.complete("x", max_tokens=7).status_code == 200
        wait_for(lambda: server.metric("generation_tokens_total") == 11, "not counted")
        assert server.metric("requests_placed_total", placement="host") == 1
        assert server.metric("requests_placed_total", placement="device") == 1
        assert server.metric("request_success_total", finished_reason="stop") == 1
        assert server.metric("request_success_total", finished_reason="length") == 1
        assert server.metric("time_to_first_token_seconds_count") == 2
        assert server.metric("inter_token_latency_seconds_count") == 9
        assert server.metric("e2e_request_latency_seconds_count") == 2
        assert server.metric("request_generation_tokens_sum") == 11
        assert server.metric("request_time_per_output_token_seconds_count") == 2
        assert server.metric("request_decode_time_seconds_sum") > 0
        assert server.metric("request_params_n_sum") == 2
        assert server.metric("request_params_max_tokens_sum") == 16 + 7
        assert server.metric("num_kv_blocks", pool="host") == 50


def test_totals_of_the_engine_s_steps_are_shown_as_they_are(server: RunningServer):
    server.complete("a")
    wait_for(lambda: "step_seconds" in server.get("/metrics").text, "no statistics")
    assert server.metric("step_seconds_total", mode="pipelined") == 1.0
    assert server.metric("pipeline_bubble_seconds_total", lane="host_attention") == 0.25
    assert server.metric("kv_swap_bytes_total", direction="out") == 20
    assert server.metric("iteration_tokens_total_count") == 7
    assert server.metric("iteration_tokens_total_bucket", le="8.0") == 6
    assert server.metric("iteration_tokens_total_bucket", le="+Inf") == 7
    assert server.metric("iteration_tokens_total_sum") == 30
    assert server.metric("request_queue_time_seconds_bucket", le="1.0") == 3
    assert server.metric("request_prefill_time_seconds_sum") == 0.5
    assert server.metric("predicted_gain_ratio") == 1.5
    assert server.metric("measured_gain_ratio") == 1.25


def test_the_access_log_names_the_request_and_probes_are_not_logged(server: RunningServer):
    server.get("/v1/models", headers={"X-Request-Id": "find-me"})
    server.get("/health")
    line = wait_for(
        lambda: [line for line in server.lines if "find-me" in line], "no line in the log"
    )[0]
    assert "GET /v1/models status=200" in line
    assert "GET /health" not in server.stderr


def test_the_statistics_line_has_the_words_that_users_search_for():
    before = stats(prompt_tokens=100, generation_tokens=10)
    after = stats(
        prompt_tokens=300,
        generation_tokens=60,
        num_running_device=2,
        num_running_host=3,
        num_waiting=4,
        device_kv_usage=0.5,
        host_kv_usage=0.25,
    )
    line = stats_line(before, after, 10.0)
    assert "Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 5.0 tokens/s" in line
    assert "Running: 5 reqs (2 device, 3 host), Waiting: 4 reqs" in line
    assert "GPU KV cache usage: 50.0%, CPU KV cache usage: 25.0%" in line


def test_the_capacity_line_counts_both_pools():
    line = capacity_line(Ready(1024, 259, "cpu", 64, 192, 16, 1.0))
    assert "GPU KV cache size: 1,024 tokens, CPU KV cache size: 3,072 tokens" in line
    assert "Maximum concurrency for 1,024 tokens per request: 4.00x" in line


@pytest.mark.parametrize("module", ["neojax.serve.supervisor", "neojax.serve.__main__"])
def test_the_http_process_never_imports_jax(module: str):
    code = (
        f"import sys, {module}, neojax.hub, neojax.text.tokenizer\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
