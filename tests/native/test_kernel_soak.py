"""A hundred thousand calls of any shape: memory and threads stay as they were."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from neojax import _cpu_paged_attn as native
from tests.native.reference import DTYPES

NUM_CALLS = 100_000
NUM_BLOCKS = 64
MAX_GROWTH_BYTES = 4 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.slow
def test_a_hundred_thousand_calls_leak_neither_memory_nor_threads():
    rng = np.random.default_rng(0)
    before = num_threads()
    pool = native.WorkerPool(3)
    caches = [
        native.HostKVCache(2, NUM_BLOCKS, num_kv_heads, head_dim, 16, dtype, pool)
        for dtype in DTYPES
        for num_kv_heads, head_dim in ((1, 128), (2, 64), (3, 40))
    ]
    for cache in caches:
        cache.fill(0.5)
    warm = 0
    for i in range(NUM_CALLS):
        if i == NUM_CALLS // 10:
            warm = resident_bytes()
        if i % 500 == 0:  # threads come and go
            pool.close()
            assert num_threads() == before
            pool = native.WorkerPool(int(rng.integers(1, 4)))
        cache = caches[i % len(caches)]
        num_seqs = int(rng.integers(1, 5))
        lens = rng.integers(1, 16 * NUM_BLOCKS // 4, num_seqs, dtype=np.int32)
        tables = rng.integers(0, NUM_BLOCKS, (num_seqs, NUM_BLOCKS // 4), dtype=np.int32)
        group = int(rng.integers(1, 9))
        width = (group + 2) * cache.num_kv_heads * cache.head_dim
        dtype = list(DTYPES.values())[i % 2]
        rows = rng.random((num_seqs, width), np.float32).astype(dtype)
        out, _ = native.attend(
            cache,
            pool,
            rows,
            lens,
            tables,
            i % 2,
            num_q_heads=group * cache.num_kv_heads,
            scale=0.1,
            window=int(rng.integers(0, 50)),
            append=bool(i % 3),
        )
        assert np.isfinite(out[0, 0])
    pool.close()
    assert num_threads() == before
    assert resident_bytes() - warm < MAX_GROWTH_BYTES
