"""The size of a KV block, and how many fit."""

from __future__ import annotations

import dataclasses

import numpy as np

GIB = 1 << 30

CPU_DEVICE_POOL_BYTES = GIB
"""Device pool on the CPU backend, where device memory is host memory: enough to try things."""


@dataclasses.dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of the KV cache of one model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: np.dtype

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers."""
        per_layer = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return self.num_layers * per_layer

    @property
    def block_bytes(self) -> int:
        """K and V of one block in all layers."""
        return self.block_size * self.token_bytes

    def num_blocks(self, num_bytes: float) -> int:
        """Whole blocks in so many bytes."""
        return int(num_bytes // self.block_bytes)
