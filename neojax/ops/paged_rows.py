"""What both Pallas kernels are made of: query heads shared out, pages read, an online softmax."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

# Finite, so that a masked score never makes NEG - NEG a NaN.
NEG = -1e30
# The maximum of a row that has seen no key. Were it NEG * scale, a fused multiply-add would leave
# the rounding error of that product, 1e22, in the exponent.
NOTHING_SEEN = -1e20
LOG2E = math.log2(math.e)
OUT_OF_RANGE = 2**30


class Tuning(NamedTuple):
    """Keys per loop step, warps per program and depth of the load pipeline."""

    keys: int
    warps: int
    stages: int


class Heads(NamedTuple):
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


def rows_of(pool: Float[Array, "P p K H"]) -> Float[Array, "slots KH"]:
    """A pool as the matrix that the kernels read."""
    return pool.reshape(pool.shape[0] * pool.shape[1], -1)


def block_of(
    ref: Any, rows: jax.Array, first: jax.Array | int = 0, width: int | None = None
) -> Any:
    """Rows of a matrix, and `width` columns from `first` on.

    Two index arrays, because the interpreter takes no mix of array and slice.
    """
    num_columns: int = ref.shape[1] if width is None else width
    columns = first + jnp.arange(num_columns, dtype=jnp.int32)
    shape = (rows.shape[0], num_columns)
    return ref.at[columns_of(rows, num_columns), lax.broadcast_in_dim(columns, shape, (1,))]


def columns_of(x: jax.Array, width: int) -> jax.Array:
    """A vector as the columns of a matrix."""
    return lax.broadcast_in_dim(x, (x.shape[0], width), (0,))


class PagedRows(NamedTuple):
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
        k = plgpu.load(block_of(self.k_ref, slots, first, self.head_dim))
        v_block = block_of(self.v_ref, slots, first, self.head_dim)
        if stop is None:
            return k, plgpu.load(v_block)
        return k, plgpu.load(v_block, mask=columns_of(positions < stop, self.head_dim), other=0.0)


class Accumulate(NamedTuple):
    """Online softmax over blocks of keys. The carry is (top, total, acc), all float32."""

    q: jax.Array  # [R, H]
    scale: float  # of scores, for base-2 exponentials; applied late, where it fuses with a sum
    kv: PagedRows
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
