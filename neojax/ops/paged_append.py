"""A step's keys and values into their pages, in place: both pools by one Pallas-Triton kernel.

XLA writes them by a scatter for each pool, whose threads move a few elements each.
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

from neojax.ops.paged_rows import OUT_OF_RANGE, block_of, columns_of

WARPS = 4
ELEMENTS = 2048
"""Elements of K, and of V, that a program moves: two vectors of 16 bytes a thread each."""


def append(
    k_pool: Float[Array, "P p K H"],
    v_pool: Float[Array, "P p K H"],
    slots: Int[Array, "T"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    *,
    is_apart: bool = False,
    elements: int = ELEMENTS,
    interpret: bool = False,
) -> tuple[Float[Array, "P p K H"], Float[Array, "P p K H"]]:
    """See `attention.append`. H is a power of two.

    is_apart: k and v lie in memory for another reader. Otherwise they are put side by side, so
        that one kernel of XLA's, with what computes them, is enough before this one.
    """
    num_tokens, num_heads, head_dim = k.shape
    num_lines = num_tokens * num_heads
    lines = min(max(1, elements // head_dim), pl.next_power_of_2(num_lines))
    k, v = k.astype(k_pool.dtype), v.astype(v_pool.dtype)
    sources = [k, v] if is_apart else [jnp.concatenate([k, v], axis=1)]
    pools = [pool.reshape(-1, head_dim) for pool in (k_pool, v_pool)]
    first_pool = 1 + len(sources)
    written = pl.pallas_call(
        functools.partial(_append_kernel, num_lines=num_lines, num_heads=num_heads, lines=lines),
        grid=(pl.cdiv(num_lines, lines),),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        input_output_aliases={first_pool: 0, first_pool + 1: 1},
        interpret=interpret,
        name="append",
    )(slots, *(source.reshape(-1, head_dim) for source in sources), *pools)
    k_pool, v_pool = (pool.reshape(k_pool.shape) for pool in written)
    return k_pool, v_pool


def _append_kernel(slots_ref: Any, *refs: Any, num_lines: int, num_heads: int, lines: int) -> None:
    """Moves lines of [T * K, H] to those of [P * p * K, H]; `refs`: sources, pools, results."""
    *sources, _, _, k_out_ref, v_out_ref = refs
    line = pl.program_id(0) * lines + jnp.arange(lines, dtype=jnp.int32)
    is_line = line < num_lines
    token, head = lax.div(line, num_heads), lax.rem(line, num_heads)
    slot = plgpu.load(slots_ref.at[token], mask=is_line, other=OUT_OF_RANGE)
    is_kept = is_line & (slot >= 0) & (slot < k_out_ref.shape[0] // num_heads)
    # Lines that are not written must not share an index with one that is: the interpreter writes
    # back what it read there.
    target = jnp.where(is_kept, slot * num_heads + head, OUT_OF_RANGE)
    if len(sources) == 1:
        (rows_ref,) = sources
        k_at = token * (2 * num_heads) + head
        reads = [(rows_ref, k_at), (rows_ref, k_at + num_heads)]
    else:
        reads = [(ref, line) for ref in sources]
    # Padding is read too, rather than that reading waits for the slots.
    is_read, is_kept = (columns_of(x, k_out_ref.shape[1]) for x in (is_line, is_kept))
    k, v = (plgpu.load(block_of(ref, at), mask=is_read) for ref, at in reads)
    for ref, x in ((k_out_ref, k), (v_out_ref, v)):
        plgpu.store(block_of(ref, target), x, mask=is_kept)
