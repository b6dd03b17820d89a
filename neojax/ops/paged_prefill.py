"""The Pallas kernel of prefill tiles.

A program attends for one tile and up to four query heads of one KV head, so that every K/V block
it loads meets 128 query rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from neojax.ops import attention
from neojax.ops.attention import TILE, Tiles
from neojax.ops.paged_rows import (
    LOG2E,
    Accumulate,
    Heads,
    PagedRows,
    Tuning,
    block_of,
    columns_of,
    rows_of,
)  # fmt: skip

ROWS = 128
"""Query rows per program: two warp groups' worth of matrix instructions."""
TUNING = Tuning(keys=64, warps=8, stages=3)
LARGE_SHARED_MEMORY = ("8.0", "8.7", "9.0", "10.0", "10.3")
"""Compute capabilities whose programs may have 160 KiB of it."""


def tuning_for(head_dim: int) -> Tuning:
    """Larger blocks are a fifth faster on an H200, where they fit."""
    device = jax.local_devices()[0]
    fits = getattr(device, "compute_capability", None) in LARGE_SHARED_MEMORY
    keys = (2 if fits else 1) * TUNING.keys * 128 // max(head_dim, 128)
    # Queries and three stages of a larger head would not fit.
    return TUNING._replace(keys=keys, stages=3 if head_dim <= 128 else 2)


def prefill(
    q: Float[Array, "T N H"],
    k_pool: Float[Array, "P p K H"],
    v_pool: Float[Array, "P p K H"],
    tiles: Tiles,
    done: Float[Array, "T N H"] | None = None,
    num_done: Int[Array, ""] | None = None,
    *,
    window: int | None = None,
    tuning: Tuning | None = None,
    tile: int = TILE,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """Attention of all tiles; rows of no tile are zero.

    With `done`, rows of tiles of length 0 are taken from there, and the rows cleared are those
    from `num_done` on.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_pool.shape
    heads = min(pl.next_power_of_2(num_heads // num_kv_heads), max(1, ROWS // tile))
    num_tiles = tiles.token.shape[0]
    tuning = tuning_for(head_dim) if tuning is None else tuning
    last = jnp.maximum(tiles.count - 1, 0)
    if num_done is None:
        num_done = jnp.where(tiles.count > 0, tiles.token[last] + tiles.length[last], 0)
    kernel = functools.partial(
        _prefill_kernel,
        Heads(num_heads, num_kv_heads, head_dim, heads),
        num_tokens=num_tokens,
        tile=tile,
        block_size=block_size,
        keys=tuning.keys,
        window=window,
    )
    out = pl.pallas_call(
        kernel,
        # One program more than tiles: it, or those of unused tiles, clears the rows of no tile.
        grid=(num_kv_heads * pl.cdiv(num_heads // num_kv_heads, heads), num_tiles + 1),
        out_shape=jax.ShapeDtypeStruct((num_tokens * num_heads, head_dim), q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tuning.warps, num_stages=tuning.stages),
        # The kernel's results go into what is done already.
        input_output_aliases={} if done is None else {9: 0},
        interpret=interpret,
        name="paged_prefill",
    )(
        jnp.stack([tiles.count, num_done]),
        tiles.token,
        tiles.length,
        tiles.position,
        tiles.row,
        tiles.tables,
        q.reshape(-1, head_dim),
        rows_of(k_pool),
        rows_of(v_pool),
        *(() if done is None else (done.reshape(-1, head_dim),)),
    )
    return out.reshape(q.shape)


def _prefill_kernel(
    heads: Heads,
    count_ref: Any,
    token_ref: Any,
    length_ref: Any,
    position_ref: Any,
    row_ref: Any,
    tables_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *o_refs: Any,
    num_tokens: int,
    tile: int,
    block_size: int,
    keys: int,
    window: int | None,
) -> None:
    o_ref = o_refs[-1]  # behind the array it shares its memory with, if any
    num_tiles = token_ref.shape[0]
    program = pl.program_id(0)
    # The last tiles of a chunk have the most keys: they start first.
    i = num_tiles - pl.program_id(1)
    count, num_done = count_ref[0], count_ref[1]
    at = jnp.minimum(i, num_tiles - 1)
    length, position, first_token = length_ref[at], position_ref[at], token_ref[at]
    rows = jnp.arange(tile * heads.per_program, dtype=jnp.int32)
    token, slot = rows // heads.per_program, rows % heads.per_program

    # Tiles without a token leave at once: where cuDNN has attended, that may be all of them.
    @pl.when(i >= count)
    def clear() -> None:
        stride = num_tiles + 1 - count

        def clear_block(b: jax.Array, carry: None) -> None:
            tokens = num_done + (i - count + b * stride) * tile + token
            where, exists = heads.rows(program, tokens, slot, tokens < num_tokens)
            mask = columns_of(exists, heads.head_dim)
            zeros = jnp.zeros((rows.shape[0], heads.head_dim), o_ref.dtype)
            plgpu.store(block_of(o_ref, where), zeros, mask=mask)

        blocks = pl.cdiv(num_tokens - num_done, tile) - (i - count)
        lax.fori_loop(0, pl.cdiv(blocks, stride), clear_block, None)

    @pl.when((i < count) & (length > 0))
    def attend() -> None:
        where, exists = heads.rows(program, first_token + token, slot, token < length)
        mask = columns_of(exists, heads.head_dim)
        q = plgpu.load(block_of(q_ref, where), mask=mask, other=0.0)
        stop = position + length
        accumulate = Accumulate(
            q,
            attention.scale(heads.head_dim) * LOG2E,
            PagedRows(
                k_ref,
                v_ref,
                tables_ref,
                row_ref[at],
                heads.kv_head(program),
                heads.head_dim,
                block_size,
                keys,
            ),
            window,
            looks_ahead=True,
        )
        masked = functools.partial(accumulate.masked, position + token, stop)
        # Blocks that every query of the tile sees whole need no mask.
        whole, stop_block = (position + 1) // keys, pl.cdiv(stop, keys)
        if window is None:
            first = 0
            carry = accumulate.start(first)
        else:
            left = jnp.maximum(position + 1 - window, 0) // keys  # the first query's first block
            first = jnp.maximum(pl.cdiv(jnp.maximum(stop - window, 0), keys), left)
            whole = jnp.maximum(whole, first)
            carry = accumulate.start(left)
            carry = lax.fori_loop(left, jnp.minimum(first, stop_block), masked, carry)
        carry = lax.fori_loop(first, whole, accumulate.whole, carry)
        _, _, total, acc = lax.fori_loop(whole, stop_block, masked, carry)
        o = acc / jnp.maximum(total, 1e-30)[:, None]
        plgpu.store(block_of(o_ref, where), o.astype(o_ref.dtype), mask=mask)
