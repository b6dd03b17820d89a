"""A step whose chunks do not lie side by side: host and device chunks take turns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from neojax.ops import attention_case
from neojax.ops.attention import Geometry, Tiles
from neojax.ops.attention_case import Case


def step_with_a_gap(geometry: Geometry) -> tuple[Case, Tiles]:
    """Chunks of 40 and 25 tokens, between which 30 tokens belong to another call.

    `expected` is zero for those 30, of which nothing is promised.
    """
    case = attention_case.make(
        np.random.default_rng(4),
        geometry,
        [(0, 40), (20, 30), (35, 25)],
        [],
        num_tokens=128,
        table_width=-(-64 // geometry.block_size),
        num_blocks=16,
    )
    tiles = case.tiles
    kept = np.flatnonzero(np.asarray(tiles.row[:4]) != 1)

    def take(x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x).at[: len(kept)].set(x[kept])

    case.expected[40:70] = 0.0
    return case, tiles._replace(
        count=jnp.int32(len(kept)),
        token=take(tiles.token),
        length=take(tiles.length),
        position=take(tiles.position),
        row=take(tiles.row) // 2,
        tables=tiles.tables.at[1].set(tiles.tables[2]),
    )
