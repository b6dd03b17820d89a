"""Reference attention over a paged pool in numpy, float64: what every implementation must equal."""

from __future__ import annotations

import numpy as np


def attend(
    q: np.ndarray,
    k_pool: np.ndarray,
    v_pool: np.ndarray,
    table: np.ndarray,
    positions: np.ndarray,
    window: int | None = None,
) -> np.ndarray:
    """One sequence's queries.

    Args:
        q: [Q, N, H].
        k_pool, v_pool: [P, p, K, H].
        table: [W] the sequence's blocks.
        positions: [Q]; query i sees positions 0..positions[i].
        window: how many of them it sees, the last ones; None: all.

    Returns:
        [Q, N, H] float64.
    """
    _, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_pool.shape[1], k_pool.shape[2]
    length = int(positions.max()) + 1
    blocks = table[: -(-length // block_size)]
    k, v = (
        pool[blocks].reshape(-1, num_kv_heads, head_dim)[:length].astype(np.float64)
        for pool in (k_pool, v_pool)
    )
    k, v = (x.repeat(num_heads // num_kv_heads, axis=1) for x in (k, v))
    s = np.einsum("qnh,snh->nqs", q.astype(np.float64), k) * head_dim**-0.5
    behind = positions[:, None] - np.arange(length)  # how far a key lies behind a query
    s = np.where((behind >= 0) & (behind < (window or length)), s, -np.inf)
    weights = np.exp(s - s.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("nqs,snh->qnh", weights, v)
