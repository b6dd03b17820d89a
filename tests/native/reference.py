"""Paged decode attention in numpy's float64, and caches filled at random to compare with."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from neojax import _cpu_paged_attn as native

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

# Relative L2 error of the kernels' output.
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 1e-3}


@dataclasses.dataclass
class Case:
    """Sequences in a poisoned cache, one layer of it used."""

    cache: native.HostKVCache
    lens: np.ndarray  # [B]
    tables: np.ndarray  # [B, W]
    rows: np.ndarray  # [B, (N+2K)*H]
    k: list[np.ndarray]  # [S, K, H] of each sequence
    v: list[np.ndarray]
    num_q_heads: int
    layer: int
    logit_scale: float

    @property
    def scale(self) -> float:
        return self.logit_scale * self.cache.head_dim**-0.5

    def new_kv(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """k, v [K, H] that the row brings."""
        num_kv_heads, head_dim = self.cache.num_kv_heads, self.cache.head_dim
        kv = self.rows[row, self.num_q_heads * head_dim :]
        k, v = kv.reshape(2, num_kv_heads, head_dim)
        return k, v

    def expected(self, **kwargs: float) -> tuple[np.ndarray, np.ndarray]:
        """out [B, N*H] and log-sum-exp [B, N] over what the cache was filled with."""
        q = self.rows[:, : self.num_q_heads * self.cache.head_dim]
        return reference(q, self.k, self.v, self.num_q_heads, self.scale, **kwargs)


def reference(
    q: np.ndarray,
    k: list[np.ndarray],
    v: list[np.ndarray],
    num_q_heads: int,
    scale: float,
    *,
    softcap: float = 0.0,
    window: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """out [B, N*H] and log-sum-exp [B, N] of q [B, N*H] over k, v [S, K, H] of each sequence."""
    outs, lses = [], []
    for q_row, k_row, v_row in zip(q, k, v, strict=True):
        num_kv_heads, head_dim = k_row.shape[1:]
        grouped = q_row.astype(np.float64).reshape(num_kv_heads, -1, head_dim)
        first = max(0, len(k_row) - window) if window else 0
        logits = np.einsum("kgh,skh->kgs", grouped, k_row[first:].astype(np.float64)) * scale
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        top = logits.max(axis=-1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(axis=-1, keepdims=True)
        out = np.einsum("kgs,skh->kgh", weights / total, v_row[first:].astype(np.float64))
        outs.append(out.reshape(-1))
        lses.append((top + np.log(total)).reshape(-1))
        assert lses[-1].shape == (num_q_heads,)
    return np.stack(outs), np.stack(lses)


def make_case(
    pool: native.WorkerPool,
    lens: list[int],
    *,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: str = "float32",
    rows_dtype: str | None = None,
    num_layers: int = 2,
    logit_scale: float = 1.0,
    seed: int = 0,
) -> Case:
    """Random sequences in shuffled blocks of a cache whose other slots hold NaN."""
    rng = np.random.default_rng(seed)
    blocks = [-(-n // block_size) for n in lens]
    num_blocks = sum(blocks) + 3
    cache = native.HostKVCache(
        num_layers, num_blocks, num_kv_heads, head_dim, block_size, dtype, pool
    )
    cache.fill(float("nan"))
    order = rng.permutation(num_blocks).astype(np.int32)
    # Entries past a sequence's end must not be followed.
    tables = np.full((len(lens), max(blocks) + 1), -1, np.int32)
    layer = num_layers - 1
    k, v = [], []
    for row, (n, count) in enumerate(zip(lens, blocks, strict=True)):
        tables[row, :count] = order[:count]
        order = order[count:]
        for into in (k, v):
            values = rng.standard_normal((n, num_kv_heads, head_dim))
            into.append(values.astype(DTYPES[dtype]))
        cache.write(layer, tables[row], 0, k[-1], v[-1])
    num_q_heads = num_kv_heads * group
    rows = rng.standard_normal((len(lens), (num_q_heads + 2 * num_kv_heads) * head_dim))
    return Case(
        cache,
        np.array(lens, np.int32),
        tables,
        rows.astype(DTYPES[rows_dtype or dtype]),
        k,
        v,
        num_q_heads,
        layer,
        logit_scale,
    )


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2 distance."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
