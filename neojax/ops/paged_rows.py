"""What the Pallas kernels are made of: query heads shared out, pages read, an online softmax."""

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

    def positions(self, block: jax.Array | int) -> jax.Array:
        """Those of a block of keys."""
        return block * self.keys + jnp.arange(self.keys, dtype=jnp.int32)

    def slots(self, block: jax.Array | int) -> jax.Array:
        """Where a block of keys lies in the pool."""
        positions = self.positions(block)
        last = self.tables_ref.shape[1] - 1
        pages = self.tables_ref[self.row, jnp.minimum(positions // self.block_size, last)]
        return pages * self.block_size + positions % self.block_size

    def load(
        self, slots: jax.Array, is_written: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """k, v [keys, H]; v is zero where nothing is written.

        Slots never written may hold anything, NaN too, and 0 * NaN would poison the row.
        """
        first = self.kv_head * self.head_dim
        k = plgpu.load(block_of(self.k_ref, slots, first, self.head_dim))
        v_block = block_of(self.v_ref, slots, first, self.head_dim)
        if is_written is None:
            return k, plgpu.load(v_block)
        return k, plgpu.load(v_block, mask=columns_of(is_written, self.head_dim), other=0.0)


class Carry(NamedTuple):
    """What a step of the online softmax hands to the next."""

    slots: jax.Array | None  # int32[keys] of the block to come, where that is looked up ahead
    top: jax.Array  # float32[R] largest scaled score
    total: jax.Array  # float32[R] sum of weights
    acc: jax.Array  # float32[R, H] weighted sum of values


class Accumulate(NamedTuple):
    """Online softmax over consecutive blocks of keys.

    Where it looks ahead, a step looks up the slots of the next. Loads of K and V whose addresses
    are loaded in the same step are issued behind the step before, and its successor waits for
    them at once; with their addresses at hand they are issued as many steps ahead as there are
    stages, each of which takes shared memory.
    """

    q: jax.Array  # [R, H]
    scale: float  # of scores, for base-2 exponentials; applied late, where it fuses with a sum
    kv: PagedRows
    window: int | None  # tokens that each row looks back; None: all
    looks_ahead: bool

    def start(self, block: jax.Array | int) -> Carry:
        """Before the first block."""
        rows, head_dim = self.q.shape
        return Carry(
            self.kv.slots(block) if self.looks_ahead else None,
            jnp.full(rows, NEG, jnp.float32),
            jnp.zeros(rows, jnp.float32),
            jnp.zeros((rows, head_dim), jnp.float32),
        )

    def whole(self, block: jax.Array, carry: Carry) -> Carry:
        """A block that every row sees."""
        k, v = self.kv.load(self._slots(block, carry))
        return self._add(self._scores(k), v, block, carry)

    def masked(
        self, positions: jax.Array, stop: jax.Array, block: jax.Array, carry: Carry
    ) -> Carry:
        """A block that each row sees up to its position, within its window."""
        keys = self.kv.positions(block)
        k, v = self.kv.load(self._slots(block, carry), keys < stop)
        visible = keys[None, :] <= positions[:, None]
        if self.window is not None:
            visible &= keys[None, :] > positions[:, None] - self.window
        return self._add(jnp.where(visible, self._scores(k), NEG), v, block, carry)

    def _slots(self, block: jax.Array, carry: Carry) -> jax.Array:
        return self.kv.slots(block) if carry.slots is None else carry.slots

    def _scores(self, k: jax.Array) -> jax.Array:
        return plgpu.dot(self.q, k, trans_b=True)

    def _add(self, s: jax.Array, v: jax.Array, block: jax.Array, carry: Carry) -> Carry:
        _, top, total, acc = carry
        new_top = jnp.maximum(jnp.maximum(top, NOTHING_SEEN), s.max(axis=1) * self.scale)
        weights = jnp.exp2(s * self.scale - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + weights.sum(axis=1)
        acc = acc * shrink[:, None] + plgpu.dot(weights.astype(v.dtype), v)
        slots = self.kv.slots(block + 1) if self.looks_ahead else None
        return Carry(slots, new_top, total, acc)
