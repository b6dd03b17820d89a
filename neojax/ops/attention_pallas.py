"""Device attention by Pallas-Triton kernels: prefill tiles and decode rows read pages in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neojax.ops import attention
from neojax.ops.attention import Decodes, NewRows, Tiles
from neojax.ops.paged_decode import decode, num_spans
from neojax.ops.paged_prefill import prefill


def attend(
    q: Float[Array, "T N H"],
    k_pool: Float[Array, "P p K H"],
    v_pool: Float[Array, "P p K H"],
    tiles: Tiles | None,
    decodes: Decodes | None,
    new: NewRows | None = None,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """See `attention.DeviceAttention`."""
    out = None
    if tiles is not None:
        with jax.named_scope("prefill_attention"):
            out = prefill(q, k_pool, v_pool, tiles, window=window, interpret=interpret)
    if decodes is None:
        return jnp.zeros_like(q) if out is None else out
    return add_decodes(q, out, k_pool, v_pool, tiles, decodes, window=window, interpret=interpret)


def add_decodes(
    q: Float[Array, "T N H"],
    out: Float[Array, "T N H"] | None,
    k_pool: Float[Array, "P p K H"],
    v_pool: Float[Array, "P p K H"],
    tiles: Tiles | None,
    decodes: Decodes,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """`out`, None without tiles, with the decode rows attended."""
    spans = num_spans(decodes, *k_pool.shape[1:3])
    with jax.named_scope("decode_attention"):
        if out is not None and spans == 1:
            return decode(
                q, k_pool, v_pool, decodes, out, window=window, spans=1, interpret=interpret
            )
        rows = attention.decode_queries(q, tiles, decodes)
        rows = decode(
            rows, k_pool, v_pool, decodes, window=window, spans=spans, interpret=interpret
        )
        return attention.with_decodes(out, rows, decodes, len(q))
