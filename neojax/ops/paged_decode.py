"""The Pallas kernel of decode rows.

A program attends for all query heads of one KV head over a span of one sequence's keys; spans are
merged by their log-sum-exp.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from neojax.ops import attention
from neojax.ops.attention import Decodes
from neojax.ops.paged_rows import (
    LOG2E,
    NEG,
    Accumulate,
    Heads,
    PagedRows,
    Tuning,
    block_of,
    columns_of,
    rows_of,
)  # fmt: skip

TUNING = Tuning(keys=64, warps=4, stages=3)
TUNING_ALONE = Tuning(keys=64, warps=4, stages=5)
"""For programs that have a multiprocessor to themselves: nothing else hides their loads."""
MULTIPROCESSORS = 132
MIN_DOT_ROWS = 16
PROGRAMS_IN_FLIGHT = 512
"""Programs that keep a large GPU's memory busy; fewer rows are split into more spans."""


def num_spans(decodes: Decodes, block_size: int, num_kv_heads: int) -> int:
    """Programs that share a row's keys: few rows would leave most of a GPU idle."""
    num_rows, width = decodes.tables.shape
    most = pl.cdiv(width * block_size, 2 * TUNING.keys)
    return max(1, min(PROGRAMS_IN_FLIGHT // (num_rows * num_kv_heads), most, 64))


def decode(
    q: Float[Array, "B N H"] | Float[Array, "T N H"],
    k_pool: Float[Array, "P p K H"],
    v_pool: Float[Array, "P p K H"],
    decodes: Decodes,
    done: Float[Array, "T N H"] | None = None,
    *,
    window: int | None = None,
    tuning: Tuning | None = None,
    spans: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B N H"] | Float[Array, "T N H"]:
    """Attention of one query per sequence; rows of length 0 are zero.

    With `done`, q is of all tokens of the step, and the rows' results take their tokens' places in
    `done`, where rows of length 0 change nothing. It takes one span.
    """
    num_heads, head_dim = q.shape[1:]
    num_rows = len(decodes.lengths)
    _, block_size, num_kv_heads, _ = k_pool.shape
    heads = max(pl.next_power_of_2(num_heads // num_kv_heads), MIN_DOT_ROWS)
    if done is not None:
        spans = 1
    elif spans is None:
        spans = num_spans(decodes, block_size, num_kv_heads)
    if tuning is None:
        is_alone = num_rows * num_kv_heads * spans <= MULTIPROCESSORS
        tuning = TUNING_ALONE if is_alone else TUNING
    kernel = functools.partial(
        _decode_kernel,
        Heads(num_heads, num_kv_heads, head_dim, heads),
        block_size=block_size,
        keys=tuning.keys,
        spans=spans,
        window=window,
        clears=done is None,
    )
    dtype = q.dtype if spans == 1 else jnp.float32
    first_token = jnp.zeros((), jnp.int32) if done is None else decodes.first_token
    out, lse = pl.pallas_call(
        kernel,
        grid=(num_kv_heads, spans, num_rows),
        out_shape=(
            jax.ShapeDtypeStruct((spans * len(q) * num_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((spans * len(q) * num_heads,), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=tuning.warps, num_stages=tuning.stages),
        input_output_aliases={} if done is None else {6: 0},
        interpret=interpret,
        name="paged_decode",
    )(
        first_token.reshape(1),
        decodes.lengths,
        decodes.tables,
        q.reshape(-1, head_dim),
        rows_of(k_pool),
        rows_of(v_pool),
        *(() if done is None else (done.reshape(-1, head_dim),)),
    )
    if spans == 1:
        return out.reshape(q.shape)
    out = out.reshape(spans, *q.shape)
    lse = lse.reshape(spans, num_rows, num_heads)
    weights = jnp.exp2(lse - lse.max(axis=0, keepdims=True))
    out = (out * weights[..., None]).sum(axis=0) / weights.sum(axis=0)[..., None]
    return out.astype(q.dtype)


def _decode_kernel(
    heads: Heads,
    first_token_ref: Any,
    lengths_ref: Any,
    tables_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *o_refs: Any,
    block_size: int,
    keys: int,
    spans: int,
    window: int | None,
    clears: bool,
) -> None:
    o_ref, lse_ref = o_refs[-2:]  # behind the array the results go into, if any
    program, span, row = (pl.program_id(axis) for axis in range(3))
    length = lengths_ref[row]
    slot = jnp.arange(heads.per_program, dtype=jnp.int32)
    token = first_token_ref[0] + row
    where, exists = heads.rows(program, token + jnp.zeros_like(slot), slot, slot >= 0)
    mask = columns_of(exists, heads.head_dim)
    out = where + span * pl.num_programs(2) * heads.num_heads

    if clears:

        @pl.when(length == 0)
        def clear() -> None:
            zeros = jnp.zeros((heads.per_program, heads.head_dim), o_ref.dtype)
            plgpu.store(block_of(o_ref, out), zeros, mask=mask)
            nothing = jnp.full(heads.per_program, NEG, jnp.float32)
            plgpu.store(lse_ref.at[out], nothing, mask=exists)

    @pl.when(length > 0)
    def attend() -> None:
        q = plgpu.load(block_of(q_ref, where), mask=mask, other=0.0)
        accumulate = Accumulate(
            q,
            attention.scale(heads.head_dim) * LOG2E,
            PagedRows(
                k_ref,
                v_ref,
                tables_ref,
                row,
                heads.kv_head(program),
                heads.head_dim,
                block_size,
                keys,
            ),
            window,
            looks_ahead=False,  # programs that share a multiprocessor hide each other's loads
        )
        everywhere = jnp.zeros(heads.per_program, jnp.int32) + (length - 1)
        masked = functools.partial(accumulate.masked, everywhere, length)
        blocks = pl.cdiv(length, keys)
        # Tokens behind the window, and the blocks that hold nothing else.
        hidden = 0 if window is None else jnp.maximum(length - window, 0)
        skipped = hidden // keys
        per_span = pl.cdiv(blocks - skipped, spans)
        first = jnp.minimum(skipped + span * per_span, blocks)
        stop = jnp.minimum(first + per_span, blocks)
        carry = accumulate.start(first)
        if window is not None:
            seen = jnp.clip(pl.cdiv(hidden, keys), first, stop)
            carry = lax.fori_loop(first, seen, masked, carry)
            first = seen
        whole = jnp.clip(length // keys, first, stop)
        carry = lax.fori_loop(first, whole, accumulate.whole, carry)
        _, top, total, acc = lax.fori_loop(whole, stop, masked, carry)
        o = acc / jnp.maximum(total, 1e-30)[:, None]
        plgpu.store(block_of(o_ref, out), o.astype(o_ref.dtype), mask=mask)
        lse = jnp.where(total > 0, top + jnp.log2(jnp.maximum(total, 1e-30)), NEG)
        plgpu.store(lse_ref.at[out], lse, mask=exists)
