"""Sizes from flags and memory: what cannot be met is refused with the numbers that work."""

from __future__ import annotations

import numpy as np
import pytest

from neojax.config import EngineConfig
from neojax.engine.build import (
    Sizes,
    build_engine,
    resolve_layers_per_program,
    resolve_rolling_rows,
    resolve_sizes,
)
from neojax.kv import host_memory
from neojax.kv.geometry import GIB, KVGeometry
from neojax.scheduler.policy import load_policy
from neojax.scheduler.swapping import MIN_STEPS_BETWEEN_MOVES

# 2 layers x 2 heads x 64 x 4 bytes x (K and V) = 2 KiB per token, 32 KiB per block.
GEOMETRY = KVGeometry(2, 2, 64, 16, np.dtype(np.float32))
BLOCK_GIB = GEOMETRY.block_bytes / GIB


def config(**settings):
    settings.setdefault("num_gpu_blocks_override", 100)
    settings.setdefault("cpu_kv_gib", 200.5 * BLOCK_GIB)
    return EngineConfig(**settings)


@pytest.mark.parametrize(
    ("policy", "flag", "rows"), [("auto", None, 0), ("rolling", None, 16), ("auto", 5, 5)]
)
def test_programs_of_rolling_steps_exist_where_they_are_asked_for(policy, flag, rows):
    asked = config(offload_policy=policy, rolling_rows=flag)
    assert resolve_rolling_rows(asked, load_policy(policy), Sizes(100, 100, 128)) == rows
    assert resolve_rolling_rows(asked, load_policy(policy), Sizes(100, 0, 128)) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"rolling_rows": 33},
        {"rolling_rows": 0, "offload_policy": "rolling"},
        {"rolling_rows": 4, "cpu_kv_gib": 0},
        {"tpot_slo_ms": 0},
        {"rotate_residency": MIN_STEPS_BETWEEN_MOVES - 1},
        {"rotate_residency": 64, "cpu_kv_gib": 0},
        {"rotate_residency": 64, "offload_policy": "full"},
        {"rotate_residency": 64, "offload_policy": "device-only"},
    ],
)
def test_settings_of_the_hosts_part_that_cannot_be_met_are_refused(settings):
    with pytest.raises(ValueError, match=r"rolling_rows|tpot_slo_ms|rotate_residency"):
        config(**settings)


def test_a_turn_on_the_device_may_be_as_short_as_any_stay():
    assert config(rotate_residency=MIN_STEPS_BETWEEN_MOVES).rotate_residency == 16


def test_the_context_is_what_the_largest_usable_pool_holds():
    assert resolve_sizes(config(), GEOMETRY, 100_000).max_model_len == 200 * 16
    only_device = resolve_sizes(config(offload_policy="device-only"), GEOMETRY, 100_000)
    assert only_device.max_model_len == 100 * 16
    assert only_device.num_host_blocks == 0
    limited = config(offload_policy="device-only", num_gpu_blocks_limit=10)
    assert resolve_sizes(limited, GEOMETRY, 100_000).max_model_len == 10 * 16
    full = config(offload_policy="full", cpu_kv_gib=50.5 * BLOCK_GIB)
    assert resolve_sizes(full, GEOMETRY, 100_000).max_model_len == 50 * 16


def test_the_context_is_no_longer_than_the_models():
    assert resolve_sizes(config(), GEOMETRY, 512).max_model_len == 512
    with pytest.raises(ValueError, match="more than the model's 512 positions"):
        resolve_sizes(config(max_model_len=513), GEOMETRY, 512)


def test_a_context_that_fits_nowhere_is_refused_with_what_would_fit():
    with pytest.raises(ValueError, match=r"Try --cpu-kv-gib \S+ or --max-model-len 3200"):
        resolve_sizes(config(max_model_len=4000), GEOMETRY, 100_000)


def test_pools_hold_no_more_than_all_sequences_can_fill():
    sizes = resolve_sizes(config(max_model_len=32, max_num_seqs=4), GEOMETRY, 512)
    assert sizes.num_host_blocks == 4 * 2
    assert sizes.num_device_blocks == 100  # asked for by number


def test_only_the_cgroup_refuses_an_explicit_host_pool(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0)
    monkeypatch.setattr(host_memory, "cgroup_room_bytes", lambda: None)
    assert resolve_sizes(config(), GEOMETRY, 100_000).num_host_blocks == 200
    monkeypatch.setattr(host_memory, "cgroup_room_bytes", lambda: 100 * GEOMETRY.block_bytes)
    with pytest.raises(ValueError, match=r"memory limit .* try --cpu-kv-gib \S+ or raise"):
        resolve_sizes(config(), GEOMETRY, 100_000)


def test_the_default_host_pool_is_bounded_by_available_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "cgroup_room_bytes", lambda: None)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 20 * GEOMETRY.block_bytes)
    sizes = resolve_sizes(config(cpu_kv_gib=None), GEOMETRY, 100_000)
    assert sizes.num_host_blocks == 10


def test_kernels_that_this_machine_lacks_are_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="--cpu-isa avx9 cannot run on this machine; available: "):
        build_engine(config(cpu_isa="avx9"), tmp_path)


def test_layers_per_program_must_divide_the_layers():
    assert resolve_layers_per_program(config(), 30) == 6
    assert resolve_layers_per_program(config(layers_per_program=10), 30) == 10
    with pytest.raises(ValueError, match="possible are 1, 2, 3, 5, 6, 10, 15, 30"):
        resolve_layers_per_program(config(layers_per_program=7), 30)
    with pytest.raises(ValueError, match="layers_per_program must be at least 1"):
        config(layers_per_program=-1)
