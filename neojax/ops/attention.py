"""Attention on the device over a paged KV pool: what implementations share, and the choice of one.

A step's device tokens are laid out as prefill chunks, then decode rows. Chunks are cut into query
tiles: a tile is a run of up to TILE consecutive tokens of one sequence, attending to the paged
prefix up to each token's own position.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int

TILE = 32
"""Queries per prefill tile: enough rows to make a matrix product, few enough to waste little."""

Implementation = Literal["xla"]


class Tiles(NamedTuple):
    """Query tiles of a step's prefill chunks. Entries from `count` on are ignored."""

    count: Int[Array, ""]  # tiles in use
    token: Int[Array, "tiles"]  # index of the tile's first token in the token arrays, ascending
    length: Int[Array, "tiles"]  # tokens in the tile, 1..TILE
    position: Int[Array, "tiles"]  # position of its first token in its sequence
    row: Int[Array, "tiles"]  # row of its sequence in `tables`
    tables: Int[Array, "C W"]  # block tables of the chunks' sequences


class Decodes(NamedTuple):
    """Decode rows of a step: one token each, consecutive in the token arrays."""

    first_token: Int[Array, ""]  # index of the first decode row in the token arrays
    lengths: Int[Array, "B"]  # context length with the row's own token; 0 = no row
    tables: Int[Array, "B W"]  # block tables


@runtime_checkable
class DeviceAttention(Protocol):
    """Attends for all device tokens of a step. K/V of those tokens are already in the pool."""

    def __call__(
        self,
        q: Float[Array, "T N H"],
        k_pool: Float[Array, "P p K H"],
        v_pool: Float[Array, "P p K H"],
        tiles: Tiles,
        decodes: Decodes | None,
    ) -> Float[Array, "T N H"]:
        """Rows that belong to no tile and no decode are zero."""
        ...


def device_attention(implementation: Implementation | None = None) -> DeviceAttention:
    """The implementation of that name, or the best one that works here."""
    from neojax.ops import attention_xla

    implementations = {"xla": attention_xla.attend}
    return implementations[implementation or "xla"]


def scale(head_dim: int) -> float:
    """The factor on q·k."""
    return head_dim**-0.5


def append(
    pool: Float[Array, "P p K H"], slots: Int[Array, "T"], rows: Float[Array, "T K H"]
) -> Float[Array, "P p K H"]:
    """Write rows to slots (block * p + offset); a slot of P * p is dropped (padding)."""
    flat = pool.reshape(-1, *pool.shape[2:])
    return flat.at[slots].set(rows.astype(pool.dtype), mode="drop").reshape(pool.shape)


def num_tiles(num_tokens: int, max_chunks: int) -> int:
    """Tiles that suffice for so many tokens in up to `max_chunks` sequences."""
    return min(num_tokens, num_tokens // TILE + min(max_chunks, num_tokens))


def as_scalar(x: jax.Array | int) -> jax.Array:
    """An int32 scalar for loop bounds."""
    return jax.numpy.asarray(x, jax.numpy.int32)
