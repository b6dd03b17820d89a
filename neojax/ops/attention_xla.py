"""Device attention in plain XLA: gathers pages, online softmax. Works everywhere; the CPU's path.

On the CPU loops run over real pages and tiles, so padding rows and wide block tables cost nothing.
A GPU would wait for the host to learn such a loop's length: there lengths are static, and all
tiles go through a step together.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from neojax.ops import attention
from neojax.ops.attention import TILE, Decodes, NewRows, Tiles

# Finite, so that a wholly masked page leaves exp(NEG - NEG) = 1 times zero weights, never a NaN.
NEG = -1e30
TOKENS_PER_GATHER = 128


def attend(
    q: Float[Array, "T N H"],
    k_pool: Float[Array, "P p K H"],
    v_pool: Float[Array, "P p K H"],
    tiles: Tiles | None,
    decodes: Decodes | None,
    new: NewRows | None = None,
    *,
    window: int | None = None,
    is_static: bool = False,
) -> Float[Array, "T N H"]:
    """See `attention.DeviceAttention`; `is_static` makes loops of a length known to the host."""
    out = None
    if tiles is not None:
        with jax.named_scope("prefill_attention"):
            prefill = _prefill_together if is_static else _prefill_in_turn
            out = prefill(q, k_pool, v_pool, tiles, window)
    if decodes is None:
        return jnp.zeros_like(q) if out is None else out
    with jax.named_scope("decode_attention"):
        rows = attention.decode_queries(q, tiles, decodes)[:, None]
        positions = decodes.lengths[:, None] - 1
        rows = _online_softmax(
            rows,
            positions,
            decodes.lengths,
            k_pool,
            v_pool,
            decodes.tables,
            window,
            is_static=is_static,
        )[:, 0]
        rows = jnp.where((decodes.lengths > 0)[:, None, None], rows, jnp.zeros((), rows.dtype))
        return attention.with_decodes(out, rows, decodes, len(q))


def _prefill_in_turn(
    q: Float[Array, "T N H"],
    k_pool: Float[Array, "P p K H"],
    v_pool: Float[Array, "P p K H"],
    tiles: Tiles,
    window: int | None,
) -> Float[Array, "T N H"]:
    """Attention of all tiles, one after the other."""
    num_tokens = q.shape[0]
    # Room for the last tile's slice, which may reach past the end.
    q = jnp.pad(q, ((0, TILE), (0, 0), (0, 0)))

    def one_tile(i: Int[Array, ""], out: Float[Array, "padded N H"]):
        first = tiles.token[i]
        rows = lax.dynamic_slice_in_dim(q, first, TILE)[None]  # [1, TILE, N, H]
        positions = (tiles.position[i] + jnp.arange(TILE, dtype=jnp.int32))[None]
        stops = (tiles.position[i] + tiles.length[i])[None]
        o = _online_softmax(
            rows, positions, stops, k_pool, v_pool, tiles.tables[tiles.row[i]][None], window
        )
        # Rows past the tile's length hold garbage: the next tile overwrites it, and what lies
        # behind the last one is cleared below.
        return lax.dynamic_update_slice_in_dim(out, o[0], first, 0)

    out = lax.fori_loop(0, tiles.count, one_tile, jnp.zeros_like(q))
    last = jnp.maximum(tiles.count - 1, 0)
    num_used = jnp.where(tiles.count > 0, tiles.token[last] + tiles.length[last], 0)
    used = jnp.arange(num_tokens, dtype=jnp.int32) < num_used
    return jnp.where(used[:, None, None], out[:num_tokens], jnp.zeros((), q.dtype))


def _prefill_together(
    q: Float[Array, "T N H"],
    k_pool: Float[Array, "P p K H"],
    v_pool: Float[Array, "P p K H"],
    tiles: Tiles,
    window: int | None,
) -> Float[Array, "T N H"]:
    """Attention of all tiles at once, unused ones too."""
    offset = jnp.arange(TILE, dtype=jnp.int32)
    num_tiles = len(tiles.token)
    is_used = jnp.arange(num_tiles, dtype=jnp.int32) < tiles.count
    length = jnp.where(is_used, tiles.length, 0)
    index = tiles.token[:, None] + offset[None]
    o = _online_softmax(
        q.at[index].get(mode="clip"),
        tiles.position[:, None] + offset[None],
        tiles.position + length,
        k_pool,
        v_pool,
        tiles.tables[tiles.row],
        window,
        is_static=True,
    )
    index = jnp.where(offset[None] < length[:, None], index, len(q))
    return jnp.zeros_like(q).at[index].set(o, mode="drop")


def _online_softmax(
    q: Float[Array, "B Q N H"],
    positions: Int[Array, "B Q"],
    stops: Int[Array, "B"],
    k_pool: Float[Array, "P p K H"],
    v_pool: Float[Array, "P p K H"],
    tables: Int[Array, "B W"],
    window: int | None,
    *,
    is_static: bool = False,
) -> Float[Array, "B Q N H"]:
    """Attention of each query to its sequence's positions up to its own, at most to the last
    `window` of them; no keys from its stop on.

    Scores, weights and sums in float32. A query at a negative position gives zeros or garbage.
    """
    num_seqs, num_queries, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_pool.shape[1], k_pool.shape[2]
    group = num_heads // num_kv_heads
    pages = max(1, TOKENS_PER_GATHER // block_size)
    span = pages * block_size
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % pages)))
    grouped = q.reshape(num_seqs, num_queries, num_kv_heads, group, head_dim)
    grouped = (grouped.astype(jnp.float32) * attention.scale(head_dim)).astype(q.dtype)
    dot = {"preferred_element_type": jnp.float32}

    def one_span(i: Int[Array, ""], carry: tuple[Array, Array, Array]):
        top, total, acc = carry  # [B, K, G, Q], [B, K, G, Q], [B, K, G, Q, H]
        ids = lax.dynamic_slice_in_dim(tables, i * pages, pages, 1)
        k = k_pool[ids].reshape(num_seqs, span, num_kv_heads, head_dim)
        v = v_pool[ids].reshape(num_seqs, span, num_kv_heads, head_dim)
        s = jnp.einsum("bqkgh,bskh->bkgqs", grouped, k, **dot)
        keys = (i * span + jnp.arange(span, dtype=jnp.int32))[None]
        visible = keys[:, None, None, None] <= positions[:, None, None, :, None]
        if window is not None:
            visible &= keys[:, None, None, None] > positions[:, None, None, :, None] - window
        s = jnp.where(visible, s, NEG)
        # Slots never written may hold anything, NaN too; 0 * NaN would poison the row.
        written = keys < stops[:, None]
        v = jnp.where(written[..., None, None], v, jnp.zeros((), v.dtype))
        new_top = jnp.maximum(top, s.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(s - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + weights.sum(axis=-1)
        o = jnp.einsum("bkgqs,bskh->bkgqh", weights.astype(v.dtype), v, **dot)
        return new_top, total, acc * shrink[..., None] + o

    shape = (num_seqs, num_kv_heads, group, num_queries)
    start = (
        jnp.full(shape, NEG, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    spans = tables.shape[1] // pages if is_static else (jnp.max(stops) + span - 1) // span
    first = 0
    if window is not None and not is_static:
        used = jnp.where(stops[:, None] > 0, positions, jnp.iinfo(jnp.int32).max)
        first = jnp.maximum(jnp.min(used) - window + 1, 0) // span
    _, total, acc = lax.fori_loop(first, spans, one_span, start)
    o = acc / jnp.maximum(total, 1e-30)[..., None]
    return o.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)
