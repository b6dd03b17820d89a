"""Device attention as Pallas-Triton kernels: prefill tiles and decode rows read pages in place.

One prefill program attends for one tile and up to four query heads of one KV head, so that every
K/V block it loads meets 128 query rows. One decode program attends for all query heads of one KV
head over a span of one sequence's keys; spans are merged by their log-sum-exp.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from neojax.ops import attention
from neojax.ops.attention import TILE, Decodes, NewRows, Tiles

# Finite, so that a masked score never makes NEG - NEG a NaN.
NEG = -1e30
# The maximum of a row that has seen no key. Were it NEG * scale, a fused multiply-add would leave
# the rounding error of that product, 1e22, in the exponent.
NOTHING_SEEN = -1e20
LOG2E = math.log2(math.e)
ROWS = 128
"""Query rows per prefill program: two warp groups' worth of matrix instructions."""
MIN_DOT_ROWS = 16
OUT_OF_RANGE = 2**30
PROGRAMS_IN_FLIGHT = 512
"""Decode programs that keep a large GPU's memory busy; fewer rows are split into more spans."""


class Tuning(NamedTuple):
    """Keys per loop step, warps per program and depth of the load pipeline."""

    keys: int
    warps: int
    stages: int


PREFILL = Tuning(keys=64, warps=8, stages=3)
DECODE = Tuning(keys=64, warps=4, stages=3)
DECODE_ALONE = Tuning(keys=64, warps=4, stages=5)
"""For programs that have a multiprocessor to themselves: nothing else hides their loads."""
MULTIPROCESSORS = 132
LARGE_SHARED_MEMORY = ("8.0", "8.7", "9.0", "10.0", "10.3")
"""Compute capabilities whose programs may have 160 KiB of it."""


def prefill_tuning(head_dim: int) -> Tuning:
    """Larger blocks are a fifth faster on an H200, where they fit."""
    device = jax.local_devices()[0]
    fits = getattr(device, "compute_capability", None) in LARGE_SHARED_MEMORY
    keys = (2 if fits else 1) * PREFILL.keys * 128 // max(head_dim, 128)
    return PREFILL._replace(keys=keys)


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
    with jax.named_scope("decode_attention"):
        rows = attention.decode_queries(q, tiles, decodes)
        rows = decode(rows, k_pool, v_pool, decodes, window=window, interpret=interpret)
        return attention.with_decodes(out, rows, decodes, len(q))


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
    tuning = prefill_tuning(head_dim) if tuning is None else tuning
    last = jnp.maximum(tiles.count - 1, 0)
    if num_done is None:
        num_done = jnp.where(tiles.count > 0, tiles.token[last] + tiles.length[last], 0)
    kernel = functools.partial(
        _prefill_kernel,
        _Heads(num_heads, num_kv_heads, head_dim, heads),
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
        _rows_of(k_pool),
        _rows_of(v_pool),
        *(() if done is None else (done.reshape(-1, head_dim),)),
    )
    return out.reshape(q.shape)


def decode(
    q: Float[Array, "B N H"],
    k_pool: Float[Array, "P p K H"],
    v_pool: Float[Array, "P p K H"],
    decodes: Decodes,
    *,
    window: int | None = None,
    tuning: Tuning | None = None,
    spans: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B N H"]:
    """Attention of one query per sequence; rows of length 0 are zero."""
    num_rows, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_pool.shape
    heads = max(pl.next_power_of_2(num_heads // num_kv_heads), MIN_DOT_ROWS)
    if spans is None:
        most = pl.cdiv(decodes.tables.shape[1] * block_size, 2 * DECODE.keys)
        spans = max(1, min(PROGRAMS_IN_FLIGHT // (num_rows * num_kv_heads), most, 64))
    if tuning is None:
        is_alone = num_rows * num_kv_heads * spans <= MULTIPROCESSORS
        tuning = DECODE_ALONE if is_alone else DECODE
    kernel = functools.partial(
        _decode_kernel,
        _Heads(num_heads, num_kv_heads, head_dim, heads),
        block_size=block_size,
        keys=tuning.keys,
        spans=spans,
        window=window,
    )
    dtype = q.dtype if spans == 1 else jnp.float32
    out, lse = pl.pallas_call(
        kernel,
        grid=(num_kv_heads, spans, num_rows),
        out_shape=(
            jax.ShapeDtypeStruct((spans * num_rows * num_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((spans * num_rows * num_heads,), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=tuning.warps, num_stages=tuning.stages),
        interpret=interpret,
        name="paged_decode",
    )(
        decodes.lengths,
        decodes.tables,
        q.reshape(-1, head_dim),
        _rows_of(k_pool),
        _rows_of(v_pool),
    )
    if spans == 1:
        return out.reshape(q.shape)
    out = out.reshape(spans, *q.shape)
    lse = lse.reshape(spans, num_rows, num_heads)
    weights = jnp.exp2(lse - lse.max(axis=0, keepdims=True))
    out = (out * weights[..., None]).sum(axis=0) / weights.sum(axis=0)[..., None]
    return out.astype(q.dtype)


class _Heads(NamedTuple):
    """How programs share query heads."""

    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    per_program: int  # a power of two; may exceed the group

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def parts(self) -> int:
        """Programs that share a KV head."""
        return pl.cdiv(self.group, self.per_program)

    def kv_head(self, program: jax.Array) -> jax.Array:
        """The KV head of a program."""
        return program // self.parts

    def rows(
        self, program: jax.Array, tokens: jax.Array, slots: jax.Array, is_token: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Rows of [T * N, H] of a program's query rows, and which of them exist."""
        head = (program % self.parts) * self.per_program + slots
        exists = is_token & (head < self.group)
        row = tokens * self.num_heads + self.kv_head(program) * self.group + head
        # Rows that do not exist must not share an index with one that does: the interpreter
        # writes back what it read there.
        return jnp.where(exists, row, OUT_OF_RANGE), exists


def _rows_of(pool: Float[Array, "P p K H"]) -> Float[Array, "slots KH"]:
    return pool.reshape(pool.shape[0] * pool.shape[1], -1)


def _block(ref: Any, rows: jax.Array, first: jax.Array | int = 0, width: int | None = None) -> Any:
    """Rows of a matrix, and `width` columns from `first` on.

    Two index arrays, because the interpreter takes no mix of array and slice.
    """
    num_columns: int = ref.shape[1] if width is None else width
    columns = first + jnp.arange(num_columns, dtype=jnp.int32)
    shape = (rows.shape[0], num_columns)
    return ref.at[_columns(rows, num_columns), lax.broadcast_in_dim(columns, shape, (1,))]


def _columns(x: jax.Array, width: int) -> jax.Array:
    """A vector as the columns of a matrix."""
    return lax.broadcast_in_dim(x, (x.shape[0], width), (0,))


def _prefill_kernel(
    heads: _Heads,
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
    is_used = i < count
    at = jnp.minimum(i, num_tiles - 1)
    rows = jnp.arange(tile * heads.per_program, dtype=jnp.int32)
    token, slot = rows // heads.per_program, rows % heads.per_program

    stride = num_tiles + 1 - count

    def clear(b: jax.Array, carry: None) -> None:
        tokens = num_done + (i - count + b * stride) * tile + token
        where, exists = heads.rows(program, tokens, slot, tokens < num_tokens)
        mask = _columns(exists, heads.head_dim)
        zeros = jnp.zeros((rows.shape[0], heads.head_dim), o_ref.dtype)
        plgpu.store(_block(o_ref, where), zeros, mask=mask)

    blocks = pl.cdiv(num_tokens - num_done, tile) - (i - count)
    lax.fori_loop(0, jnp.where(is_used, 0, pl.cdiv(blocks, stride)), clear, None)

    length = jnp.where(is_used, length_ref[at], 0)
    position = position_ref[at]
    where, exists = heads.rows(program, token_ref[at] + token, slot, token < length)
    mask = _columns(exists, heads.head_dim)
    q = plgpu.load(_block(q_ref, where), mask=mask, other=0.0)
    stop = jnp.where(length > 0, position + length, 0)
    accumulate = _Accumulate(
        q,
        attention.scale(heads.head_dim) * LOG2E,
        _PagedRows(
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
    )
    masked = functools.partial(accumulate.masked, position + token, stop)
    carry = accumulate.start()
    # Blocks that every query of the tile sees whole need no mask.
    whole = jnp.where(length > 0, (position + 1) // keys, 0)
    first = 0
    if window is not None:
        left = jnp.maximum(position + 1 - window, 0) // keys  # the first query's first block
        first = jnp.maximum(pl.cdiv(jnp.maximum(stop - window, 0), keys), left)
        whole = jnp.maximum(whole, first)
        carry = lax.fori_loop(left, jnp.minimum(first, pl.cdiv(stop, keys)), masked, carry)
    carry = lax.fori_loop(first, whole, accumulate.whole, carry)
    carry = lax.fori_loop(whole, pl.cdiv(stop, keys), masked, carry)
    _, total, acc = carry
    o = acc / jnp.maximum(total, 1e-30)[:, None]
    plgpu.store(_block(o_ref, where), o.astype(o_ref.dtype), mask=mask)


def _decode_kernel(
    heads: _Heads,
    lengths_ref: Any,
    tables_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    o_ref: Any,
    lse_ref: Any,
    *,
    block_size: int,
    keys: int,
    spans: int,
    window: int | None,
) -> None:
    program, span, row = (pl.program_id(axis) for axis in range(3))
    length = lengths_ref[row]
    slot = jnp.arange(heads.per_program, dtype=jnp.int32)
    where, exists = heads.rows(program, row + jnp.zeros_like(slot), slot, slot >= 0)
    mask = _columns(exists, heads.head_dim)
    q = plgpu.load(_block(q_ref, where), mask=mask, other=0.0)
    accumulate = _Accumulate(
        q,
        attention.scale(heads.head_dim) * LOG2E,
        _PagedRows(
            k_ref, v_ref, tables_ref, row, heads.kv_head(program), heads.head_dim, block_size, keys
        ),
        window,
    )
    everywhere = jnp.zeros(heads.per_program, jnp.int32) + (length - 1)
    masked = functools.partial(accumulate.masked, everywhere, length)
    carry = accumulate.start()
    blocks = pl.cdiv(length, keys)
    # Tokens behind the window, and the blocks that hold nothing else.
    hidden = 0 if window is None else jnp.maximum(length - window, 0)
    skipped = hidden // keys
    per_span = pl.cdiv(blocks - skipped, spans)
    first = jnp.minimum(skipped + span * per_span, blocks)
    stop = jnp.minimum(first + per_span, blocks)
    if window is not None:
        seen = jnp.clip(pl.cdiv(hidden, keys), first, stop)
        carry = lax.fori_loop(first, seen, masked, carry)
        first = seen
    whole = jnp.clip(length // keys, first, stop)
    carry = lax.fori_loop(first, whole, accumulate.whole, carry)
    top, total, acc = lax.fori_loop(whole, stop, masked, carry)
    o = acc / jnp.maximum(total, 1e-30)[:, None]
    out = where + span * pl.num_programs(2) * heads.num_heads
    plgpu.store(_block(o_ref, out), o.astype(o_ref.dtype), mask=mask)
    lse = jnp.where(total > 0, top + jnp.log2(jnp.maximum(total, 1e-30)), NEG)
    plgpu.store(lse_ref.at[out], lse, mask=exists)


class _PagedRows(NamedTuple):
    """One KV head of one sequence, loaded in blocks of `keys` consecutive positions."""

    k_ref: Any
    v_ref: Any
    tables_ref: Any
    row: jax.Array
    kv_head: jax.Array
    head_dim: int
    block_size: int
    keys: int

    def load(self, block: jax.Array, stop: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """k, v [keys, H]; v is zero from position `stop` on.

        Slots never written may hold anything, NaN too, and 0 * NaN would poison the row.
        """
        positions = block * self.keys + jnp.arange(self.keys, dtype=jnp.int32)
        last = self.tables_ref.shape[1] - 1
        pages = self.tables_ref[self.row, jnp.minimum(positions // self.block_size, last)]
        slots = pages * self.block_size + positions % self.block_size
        first = self.kv_head * self.head_dim
        k = plgpu.load(_block(self.k_ref, slots, first, self.head_dim))
        v_block = _block(self.v_ref, slots, first, self.head_dim)
        if stop is None:
            return k, plgpu.load(v_block)
        return k, plgpu.load(v_block, mask=_columns(positions < stop, self.head_dim), other=0.0)


class _Accumulate(NamedTuple):
    """Online softmax over blocks of keys. The carry is (top, total, acc), all float32."""

    q: jax.Array  # [R, H]
    scale: float  # of scores, for base-2 exponentials; applied late, where it fuses with a sum
    kv: _PagedRows
    window: int | None  # tokens that each row looks back; None: all

    def start(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        rows, head_dim = self.q.shape
        return (
            jnp.full(rows, NEG, jnp.float32),
            jnp.zeros(rows, jnp.float32),
            jnp.zeros((rows, head_dim), jnp.float32),
        )

    def whole(self, block: jax.Array, carry: Any) -> Any:
        """A block that every row sees."""
        k, v = self.kv.load(block)
        return self._add(self._scores(k), v, carry)

    def masked(self, positions: jax.Array, stop: jax.Array, block: jax.Array, carry: Any) -> Any:
        """A block that each row sees up to its position, within its window."""
        k, v = self.kv.load(block, stop)
        keys = block * self.kv.keys + jnp.arange(self.kv.keys, dtype=jnp.int32)
        visible = keys[None, :] <= positions[:, None]
        if self.window is not None:
            visible &= keys[None, :] > positions[:, None] - self.window
        return self._add(jnp.where(visible, self._scores(k), NEG), v, carry)

    def _scores(self, k: jax.Array) -> jax.Array:
        return plgpu.dot(self.q, k, trans_b=True)

    def _add(self, s: jax.Array, v: jax.Array, carry: Any) -> Any:
        top, total, acc = carry
        new_top = jnp.maximum(jnp.maximum(top, NOTHING_SEEN), s.max(axis=1) * self.scale)
        weights = jnp.exp2(s * self.scale - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + weights.sum(axis=1)
        acc = acc * shrink[:, None] + plgpu.dot(weights.astype(v.dtype), v)
        return new_top, total, acc
