"""Random steps with known attention: what the self-test, the tests and the benchmark run on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from neojax.ops import attention, attention_ref
from neojax.ops.attention import Append, Decodes, Geometry, NewRows, Tiles


class Case(NamedTuple):
    """A step's arguments, and what attention must give for them."""

    q: jax.Array  # [T, N, H]
    k_pool: jax.Array  # [P, p, K, H], NaN in slots that nobody wrote
    v_pool: jax.Array
    tiles: Tiles
    decodes: Decodes
    new: NewRows
    expected: np.ndarray  # [T, N, H] float64

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What `DeviceAttention` takes."""
        return self[:-1]

    def error(self, out: jax.Array) -> float:
        """Relative L2 distance from the expected; infinite where a padding row is not zero."""
        got = np.asarray(out.astype(jnp.float32), np.float64)
        is_padding = ~self.expected.any(axis=(1, 2))
        if not np.isfinite(got).all() or got[is_padding].any():
            return float("inf")
        norm = max(float(np.linalg.norm(self.expected)), 1e-9)
        return float(np.linalg.norm(got - self.expected)) / norm


def make(
    rng: np.random.Generator,
    geometry: Geometry,
    chunks: Sequence[tuple[int, int]],
    decodes: Sequence[int],
    *,
    num_tokens: int,
    table_width: int,
    num_blocks: int,
    max_chunks: int = 8,
    max_rows: int = 8,
) -> Case:
    """A step of chunks (start, tokens) and of decode rows of these context lengths."""
    spans = [*chunks, *((length - 1, 1) for length in decodes)]
    tables = _tables(
        rng, [start + n for start, n in spans], geometry.block_size, table_width, num_blocks
    )
    shape = (num_blocks, geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
    written = np.zeros(shape[0] * shape[1], bool)
    for table, (start, n) in zip(tables, spans, strict=True):
        positions = np.arange(start + n)
        written[
            table[positions // geometry.block_size] * geometry.block_size
            + positions % geometry.block_size
        ] = True
    written = written.reshape(shape[0], shape[1], 1, 1)
    k_pool, v_pool = (
        jnp.asarray(np.where(written, rng.standard_normal(shape), np.nan), geometry.dtype)
        for _ in range(2)
    )
    q = rng.standard_normal((num_tokens, geometry.num_heads, geometry.head_dim))
    q = jnp.asarray(q, geometry.dtype)
    tiles, rows = layout(
        tables, chunks, decodes, num_tokens=num_tokens, max_chunks=max_chunks, max_rows=max_rows
    )
    q64, k64, v64 = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k_pool, v_pool))
    expected = np.zeros(q64.shape)
    new64 = np.full((2, num_tokens, *shape[2:]), np.nan)
    token = 0
    for table, (start, n) in zip(tables, spans, strict=True):
        here = slice(token, token + n)
        positions = start + np.arange(n)
        slots = table[positions // geometry.block_size], positions % geometry.block_size
        new64[:, here] = k64[slots], v64[slots]
        expected[here] = attention_ref.attend(
            q64[here], k64, v64, table, positions, geometry.window
        )
        token += n
    new = NewRows(*(jnp.asarray(x, geometry.dtype) for x in new64))
    return Case(q, k_pool, v_pool, tiles, rows, new, expected)


def writes_alike(append: Append, case: Case, seed: int = 0) -> bool:
    """Whether the case's new rows, half of them padding, get where `attention.append` puts them.

    Other slots must keep what they hold.
    """
    num_slots = case.k_pool.shape[0] * case.k_pool.shape[1]
    num_tokens = len(case.q)
    slots = np.random.default_rng(seed).permutation(max(2 * num_slots, num_tokens))[:num_tokens]
    arguments = (case.k_pool, case.v_pool, jnp.asarray(slots, jnp.int32), *case.new)
    pairs = zip(append(*arguments), attention.append(*arguments), strict=True)
    return all(
        np.array_equal(*(np.asarray(pool.astype(jnp.float32)) for pool in pair), equal_nan=True)
        for pair in pairs
    )


def layout(
    tables: np.ndarray,
    chunks: Sequence[tuple[int, int]],
    decodes: Sequence[int],
    *,
    num_tokens: int,
    max_chunks: int,
    max_rows: int,
) -> tuple[Tiles, Decodes]:
    """Metadata of a step; `tables` [chunks + decodes, W] are its sequences' blocks."""
    tile = attention.TILE
    width = tables.shape[1]
    entries = [
        (offset + token, min(tile, n - offset), start + offset, row)
        for row, ((start, n), token) in enumerate(
            zip(chunks, np.cumsum([0, *(n for _, n in chunks)]), strict=False)
        )
        for offset in range(0, n, tile)
    ]
    packed = np.zeros((4, attention.num_tiles(num_tokens, max_chunks)), np.int32)
    packed[:, : len(entries)] = np.asarray(entries, np.int32).reshape(-1, 4).T
    chunk_tables = np.zeros((max_chunks, width), np.int32)
    chunk_tables[: len(chunks)] = tables[: len(chunks)]
    lengths = np.zeros(min(num_tokens, max_rows), np.int32)
    lengths[: len(decodes)] = decodes
    decode_tables = np.zeros((len(lengths), width), np.int32)
    decode_tables[: len(decodes)] = tables[len(chunks) :]
    first = np.int32(sum(n for _, n in chunks))
    token, length, position, row = (jnp.asarray(entry) for entry in packed)
    count, of_chunks = jnp.int32(len(entries)), jnp.asarray(chunk_tables)
    return (
        Tiles(count, token, length, position, row, of_chunks),
        Decodes(jnp.asarray(first), jnp.asarray(lengths), jnp.asarray(decode_tables)),
    )


def _tables(
    rng: np.random.Generator, lengths: Sequence[int], block_size: int, width: int, num_blocks: int
) -> np.ndarray:
    """Blocks for sequences of these lengths, shuffled over the pool."""
    free = rng.permutation(num_blocks)
    tables = np.zeros((len(lengths), width), np.int32)
    taken = 0
    for table, length in zip(tables, lengths, strict=True):
        n = -(-length // block_size)
        table[:n] = free[taken : taken + n]
        taken += n
    return tables
