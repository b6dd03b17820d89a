"""Device attention over a paged KV pool: what implementations share.

A step's device tokens are laid out as prefill chunks, then decode rows. Chunks are cut into query
tiles: a tile is a run of up to `tile` consecutive tokens of one sequence, attending to the paged
prefix up to each token's own position.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

logger = logging.getLogger(__name__)

TILE = 32
"""Queries per prefill tile: enough rows to make a matrix product, few enough to waste little."""

Implementation = Literal["xla", "pallas", "cudnn"]


class Tiles(NamedTuple):
    """Query tiles of a step's prefill chunks. Entries from `count` on are ignored."""

    count: Int[Array, ""]  # tiles in use
    token: Int[Array, "tiles"]  # index of the tile's first token in the token arrays, ascending
    length: Int[Array, "tiles"]  # tokens in the tile, 1..tile
    position: Int[Array, "tiles"]  # position of its first token in its sequence
    row: Int[Array, "tiles"]  # row of its sequence in `tables`
    tables: Int[Array, "C W"]  # block tables of the chunks' sequences


class Decodes(NamedTuple):
    """Decode rows of a step: one token each, consecutive in the token arrays."""

    first_token: Int[Array, ""]  # index of the first decode row in the token arrays
    lengths: Int[Array, "B"]  # context length with the row's own token; 0 = no row
    tables: Int[Array, "B W"]  # block tables


class NewRows(NamedTuple):
    """K and V of the step's device tokens, which are in the pool too."""

    k: Float[Array, "T K H"]
    v: Float[Array, "T K H"]


Attend: TypeAlias = Callable[
    [jax.Array, jax.Array, jax.Array, Tiles | None, Decodes | None, NewRows | None], jax.Array
]


Append: TypeAlias = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]
]


def append(
    k_pool: Float[Array, "P p K H"],
    v_pool: Float[Array, "P p K H"],
    slots: Int[Array, "T"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
) -> tuple[Float[Array, "P p K H"], Float[Array, "P p K H"]]:
    """Write K and V of tokens to their slots (block * p + offset) of both pools, in plain XLA.

    Slots are distinct, but for those of P * p or more, which are dropped (padding); none is
    negative.
    """

    def write(pool: jax.Array, rows: jax.Array) -> jax.Array:
        flat = pool.reshape(-1, *pool.shape[2:])
        return flat.at[slots].set(rows.astype(pool.dtype), mode="drop").reshape(pool.shape)

    return write(k_pool, k), write(v_pool, v)


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)  # jax.jit refers weakly
class DeviceAttention:
    """Writes K/V of a step's device tokens to the pools, then attends for all of them."""

    name: Implementation
    attend: Attend
    append: Append = append

    def __call__(
        self,
        q: Float[Array, "T N H"],
        k_pool: Float[Array, "P p K H"],
        v_pool: Float[Array, "P p K H"],
        tiles: Tiles | None,
        decodes: Decodes | None,
        new: NewRows | None = None,
    ) -> Float[Array, "T N H"]:
        """Attention of all device tokens, whose K/V are already in the pools.

        Rows of no tile and no decode are zero; if they lie between tiles, anything.

        A step of decode rows alone may leave out the tiles; its rows start at token 0, and gather
        and scatter of rows are saved. Where `new` is at hand, attention within a sequence's first
        chunk can be faster than over pages.
        """
        return self.attend(q, k_pool, v_pool, tiles, decodes, new)


class Geometry(NamedTuple):
    """What an implementation must support."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    window: int | None = None  # tokens that each token looks back, its own included; None: all


def device_attention(
    implementation: Implementation | None = None, geometry: Geometry | None = None
) -> DeviceAttention:
    """The implementation of that name, or the best one that works here.

    Args:
        implementation: None tries the fast ones on a small case first, on a GPU that can run them.
        geometry: heads, block size and dtype to serve; None means that only `xla` may be chosen.

    Raises:
        ValueError: the implementation asked for cannot run here.
    """
    from neojax.ops import attention_choice

    return attention_choice.choose(implementation, geometry)


def scale(head_dim: int) -> float:
    """The factor on q·k."""
    return head_dim**-0.5


def num_tiles(num_tokens: int, max_chunks: int) -> int:
    """Tiles that suffice for so many tokens in up to `max_chunks` sequences."""
    return min(num_tokens, num_tokens // TILE + min(max_chunks, num_tokens))


def decode_queries(
    q: Float[Array, "T N H"], tiles: Tiles | None, decodes: Decodes
) -> Float[Array, "B N H"]:
    """The queries of the decode rows; rows of length 0 get any."""
    num_rows = decodes.lengths.shape[0]
    if tiles is None:
        return q[:num_rows]
    return q.at[decodes.first_token + jnp.arange(num_rows, dtype=jnp.int32)].get(mode="clip")


def with_decodes(
    out: Float[Array, "T N H"] | None,
    rows: Float[Array, "B N H"],
    decodes: Decodes,
    num_tokens: int,
) -> Float[Array, "T N H"]:
    """`out` with the decode rows' results, but for rows of length 0; without it, all of `rows`."""
    num_rows = len(rows)
    if out is None:
        return jnp.pad(rows, ((0, num_tokens - num_rows), (0, 0), (0, 0)))
    index = jnp.arange(num_rows, dtype=jnp.int32)
    # Rows of length 0 go out of bounds, each to a place of its own: indices are unique.
    index += jnp.where(decodes.lengths > 0, decodes.first_token, num_tokens)
    return out.at[index].set(rows, mode="drop", unique_indices=True, indices_are_sorted=True)
