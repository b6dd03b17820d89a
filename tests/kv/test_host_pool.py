"""The host pool of a model: a shape that no kernel takes ends the start, by name."""

from __future__ import annotations

import os

import numpy as np
import pytest

from neojax.kv.geometry import KVGeometry
from neojax.kv.host_pool import HostPool


def host_pool(head_dim: int, block_size: int = 16, num_heads: int = 4) -> HostPool:
    return HostPool(
        KVGeometry(1, 2, head_dim, block_size, np.dtype(np.float32)),
        4,
        num_heads=num_heads,
        max_rows=2,
        scale=1.0,
        max_chunk_tokens=16,
        max_swap_blocks=1,
        num_threads=3,
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"head_dim": 12}, "head_dim must be a multiple of 8 up to 256, got 12"),
        ({"head_dim": 512}, "head_dim must be a multiple of 8 up to 256, got 512"),
        ({"head_dim": 8, "block_size": 24}, "block_size must be a multiple of 16, got 24"),
        ({"head_dim": 8, "num_heads": 5}, "num_q_heads must be a multiple of the 2 kv heads"),
    ],
)
def test_a_model_that_no_kernel_takes_is_refused_and_leaves_nothing(shape: dict, message: str):
    host_pool(8).close()
    num_threads = len(os.listdir("/proc/self/task"))
    with pytest.raises(ValueError, match=message):
        host_pool(**shape)
    assert len(os.listdir("/proc/self/task")) == num_threads
