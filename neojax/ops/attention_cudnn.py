"""Device attention with cuDNN for chunks that start a sequence, and Pallas kernels for the rest.

A first chunk attends to nothing but itself: its keys lie beside its queries, and cuDNN's kernel
for packed sequences is about twice as fast as a portable one. It cannot read pages, nor align a
causal mask with the end of a longer prefix, so later chunks take the Pallas kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# jax.nn.dot_product_attention does not offer packed sequences.
from jax._src.cudnn import fused_attention_stablehlo as fused
from jaxtyping import Array, Float, Int

from neojax.ops import attention, attention_pallas, paged_append
from neojax.ops.attention import Decodes, NewRows, Tiles
from neojax.ops.paged_prefill import prefill

MIN_TOKENS = 2048
"""Smaller steps gain less than the launches of more kernels cost (H200: even at 1500)."""


def append(
    k_pool: Float[Array, "P p K H"],
    v_pool: Float[Array, "P p K H"],
    slots: Int[Array, "T"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
) -> tuple[Float[Array, "P p K H"], Float[Array, "P p K H"]]:
    """See `attention.append`. Where cuDNN attends, k and v lie in memory for it."""
    is_apart = len(k) >= MIN_TOKENS
    return paged_append.append(k_pool, v_pool, slots, k, v, is_apart=is_apart)


def attend(
    q: Float[Array, "T N H"],
    k_pool: Float[Array, "P p K H"],
    v_pool: Float[Array, "P p K H"],
    tiles: Tiles | None,
    decodes: Decodes | None,
    new: NewRows | None = None,
    *,
    window: int | None = None,
    min_tokens: int = MIN_TOKENS,
) -> Float[Array, "T N H"]:
    """See `attention.DeviceAttention`. Steps below `min_tokens` take the Pallas kernel alone."""
    if tiles is None or new is None or len(q) < min_tokens:
        return attention_pallas.attend(q, k_pool, v_pool, tiles, decodes, window=window)
    with jax.named_scope("prefill_attention"):
        chunks = chunks_of(tiles, len(q), window)
        done = first_chunks(q, new, chunks)
        left = tiles._replace(length=jnp.where(chunks.is_first[tiles.row], 0, tiles.length))
        out = prefill(q, k_pool, v_pool, left, done, chunks.stop, window=window)
    if decodes is None:
        return out
    return attention_pallas.add_decodes(q, out, k_pool, v_pool, tiles, decodes, window=window)


class Chunks(NamedTuple):
    """The prefill chunks of a step, by row of the tiles' block tables."""

    token: Int[Array, "C"]  # index of the first token; of no chunk: the number of tokens
    length: Int[Array, "C"]
    is_first: jax.Array  # bool[C] the chunk starts its sequence, and no window cuts it
    stop: Int[Array, ""]  # index behind the last chunk's last token


def first_chunks(q: Float[Array, "T N H"], new: NewRows, chunks: Chunks) -> Float[Array, "T N H"]:
    """Causal attention within each first chunk; rows of no first chunk hold anything."""
    lengths = jnp.where(chunks.is_first, chunks.length, 0)[None]
    offsets = jnp.append(chunks.token, jnp.int32(len(q)))[None]
    out: Any = fused.dot_product_attention(
        q[None],
        new.k[None],
        new.v[None],
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=attention.scale(q.shape[-1]),
        mask_type=fused.MaskType.PADDING_CAUSAL,
    )
    return (out[0] if isinstance(out, (tuple, list)) else out)[0]


def chunks_of(tiles: Tiles, num_tokens: int, window: int | None = None) -> Chunks:
    """The chunks that tiles were cut from; other tokens may lie between them."""
    rows = jnp.arange(len(tiles.tables), dtype=jnp.int32)
    is_used = jnp.arange(len(tiles.row), dtype=jnp.int32) < tiles.count
    is_mine = is_used[None] & (tiles.row[None] == rows[:, None])  # [C, tiles]
    length = jnp.where(is_mine, tiles.length[None], 0).sum(axis=1)
    token = jnp.where(is_mine, tiles.token[None], num_tokens).min(axis=1)
    is_first = (is_mine & (tiles.position[None] == 0)).any(axis=1)
    if window is not None:
        is_first &= length <= window
    stop = jnp.where(length > 0, token + length, 0).max()
    return Chunks(token, length, is_first, stop)
