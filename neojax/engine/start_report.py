"""What a start took and what it left where: the table in the log of every engine."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from neojax.kv.geometry import GIB, KVGeometry
from neojax.runner.runner import Runner

log = logging.getLogger(__name__)


class MemoryRow(NamedTuple):
    """One line of the table."""

    what: str
    num_bytes: float
    num_tokens: int | None = None  # of KV cache that it holds


class StartClock:
    """Seconds of a start, by part, from the beginning of the process."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {"import": _process_age_s()}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside belongs to this part."""
        started = time.perf_counter()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - started

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        return f"{sum(self.parts.values()):.1f} s: {parts}"


def memory_rows(
    runner: Runner, geometry: KVGeometry, programs: Sequence[jax.stages.Compiled]
) -> list[MemoryRow]:
    """Where memory went; `programs` are the compiled ones, none when nothing was compiled yet.

    Activations are the largest program's temporary memory and results, doubled for two steps in
    flight. The reserve is what the device was allowed to take and has never held.
    """
    config = runner.config
    rows = [MemoryRow("weights", runner.weight_bytes)]
    # What a backend does not tell has no row.
    analyses = [a for program in programs if (a := program.memory_analysis()) is not None]
    if analyses:
        largest = max(
            a.temp_size_in_bytes + a.output_size_in_bytes - a.alias_size_in_bytes for a in analyses
        )
        rows.append(MemoryRow("activations", 2 * largest))
        if code := sum(a.generated_code_size_in_bytes for a in analyses):
            rows.append(MemoryRow("programs", code))
    rows.append(_kv("device KV", config.num_device_blocks, geometry))
    if config.num_host_blocks:
        layer_token_bytes = geometry.token_bytes / geometry.num_layers
        scratch = 2 * runner.scratch_tokens * layer_token_bytes
        rows.append(MemoryRow("host prefill scratch", scratch))
        rows.append(_kv("host KV", config.num_host_blocks, geometry))
    stats = jax.devices()[0].memory_stats()
    if stats is not None:
        rows.append(MemoryRow("reserve", stats["bytes_limit"] - stats["peak_bytes_in_use"]))
    return rows


def log_start(clock: StartClock, rows: Sequence[MemoryRow], runner: Runner) -> None:
    """One line per kind of memory, and the time."""
    max_model_len = runner.config.max_model_len
    for what, num_bytes, num_tokens in rows:
        tokens = ""
        if num_tokens is not None:
            tokens = (
                f", {num_tokens:,} tokens: {num_tokens / max_model_len:.2f} requests of "
                f"{max_model_len:,}"
            )
        log.info("%-20s %7.2f GiB%s", what, num_bytes / GIB, tokens)
    log.info("engine ready, %d programs, after %s", runner.num_programs, clock)


def _kv(what: str, num_blocks: int, geometry: KVGeometry) -> MemoryRow:
    return MemoryRow(what, num_blocks * geometry.block_bytes, num_blocks * geometry.block_size)


def _process_age_s() -> float:
    """Seconds since this process began."""
    with open("/proc/self/stat", encoding="utf-8") as f:
        started_ticks = int(f.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
