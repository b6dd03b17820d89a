"""Programs that start and join host attention, and what they are given."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from neojax import _cpu_paged_attn as native
from neojax.ops import host_attention
from tests.native.reference import Case

# What an FFI error becomes: the first where XLA runs the program inline, the other elsewhere.
REFUSED = (ValueError, jax.errors.JaxRuntimeError)


def make_lane(case: Case, pool: native.WorkerPool, **kwargs) -> native.HostLane:
    kwargs = {"num_channels": 2, "max_rows": 8, **kwargs}
    return native.HostLane(case.cache, pool, case.num_q_heads, scale=case.scale, **kwargs)


def pad_rows(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Rows of a bucket: what lies beyond the sequences is poison."""
    padding = np.full((num_rows - len(rows), rows.shape[1]), np.nan, rows.dtype)
    return np.concatenate([rows, padding])


def start_and_join(lane: native.HostLane, case: Case, channel: int = 0) -> Callable:
    """A program that starts and joins one job, with work in between."""

    @jax.jit
    def program(rows: jax.Array, hdr: jax.Array, tie: jax.Array) -> tuple[jax.Array, jax.Array]:
        ticket, tie = host_attention.start(rows, hdr, tie, lane=lane.id, channel=channel)
        tie = tie @ tie
        return host_attention.join(
            ticket,
            tie,
            lane=lane.id,
            channel=channel,
            num_rows=rows.shape[0],
            num_q_heads=case.num_q_heads,
            head_dim=case.cache.head_dim,
            dtype=rows.dtype,
        )

    return program


def hdr(plan: int, layer: int, n: int) -> np.ndarray:
    return np.array([plan, layer, n], np.int32)


def append_new(case: Case) -> None:
    """What the reference expects after a call: the rows' own k, v at the end of each sequence."""
    for row, n in enumerate(case.lens):
        case.k[row][n - 1], case.v[row][n - 1] = case.new_kv(row)
