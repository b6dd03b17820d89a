"""The throughput line in the log, in the words that vLLM's users search for."""

from __future__ import annotations

import asyncio
import logging
import time

from neojax.engine.messages import Ready
from neojax.engine.report import EngineStats
from neojax.serve.state import ServeState

log = logging.getLogger("neojax.serve")


async def log_stats(state: ServeState, interval_s: float = 10.0) -> None:
    """Write a line each interval in which something happened, until cancelled."""
    before, before_s = state.client.stats if state.client else None, time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        stats, now_s = state.client.stats if state.client else None, time.monotonic()
        if stats is None:
            continue
        if before is None or _work(stats) != _work(before) or _num_requests(stats):
            log.info("%s", stats_line(before, stats, now_s - before_s))
        before, before_s = stats, now_s


def stats_line(before: EngineStats | None, stats: EngineStats, elapsed_s: float) -> str:
    """Throughput since `before` and the state of both pools."""
    prompt = stats.prompt_tokens - (before.prompt_tokens if before else 0)
    generated = stats.generation_tokens - (before.generation_tokens if before else 0)
    return (
        f"Avg prompt throughput: {prompt / elapsed_s:.1f} tokens/s, "
        f"Avg generation throughput: {generated / elapsed_s:.1f} tokens/s, "
        f"Running: {stats.num_running_device + stats.num_running_host} reqs "
        f"({stats.num_running_device} device, {stats.num_running_host} host), "
        f"Waiting: {stats.num_waiting} reqs, "
        f"GPU KV cache usage: {100 * stats.device_kv_usage:.1f}%, "
        f"CPU KV cache usage: {100 * stats.host_kv_usage:.1f}%"
    )


def capacity_line(ready: Ready) -> str:
    """Size of both pools in tokens, and how many longest requests they hold."""
    device = ready.num_device_blocks * ready.block_size
    host = ready.num_host_blocks * ready.block_size
    concurrency = (device + host) / ready.max_model_len
    return (
        f"GPU KV cache size: {device:,} tokens, CPU KV cache size: {host:,} tokens, "
        f"sum {device + host:,}, Maximum concurrency for {ready.max_model_len:,} tokens per "
        f"request: {concurrency:.2f}x"
    )


def _work(stats: EngineStats) -> tuple[int, int]:
    return stats.prompt_tokens, stats.generation_tokens


def _num_requests(stats: EngineStats) -> int:
    return stats.num_running_device + stats.num_running_host + stats.num_waiting
