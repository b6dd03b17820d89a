"""Every device attention implementation against the float64 reference, over random shapes."""

from __future__ import annotations

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from neojax.ops import attention, attention_ref
from neojax.ops.attention import TILE, Decodes, Tiles

TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}  # relative L2


def build_step(rng, chunks, decodes, num_tokens, block_size, width, num_blocks):
    """Metadata of a step with chunks [(start, n)] and decode contexts [length]."""
    free = rng.permutation(num_blocks)
    tables = np.zeros((len(chunks) + len(decodes), width), np.int32)
    stops = [start + n for start, n in chunks] + list(decodes)
    taken = 0
    for row, stop in enumerate(stops):
        n = -(-stop // block_size)
        tables[row, :n] = free[taken : taken + n]
        taken += n
    n_tiles = attention.num_tiles(num_tokens, 8)
    tiles = np.zeros((4, n_tiles), np.int32)
    count, token = 0, 0
    for row, (start, n) in enumerate(chunks):
        for offset in range(0, n, TILE):
            length = min(TILE, n - offset)
            tiles[:, count] = (token + offset, length, start + offset, row)
            count += 1
        token += n
    lengths = np.zeros(min(num_tokens, 8), np.int32)
    lengths[: len(decodes)] = decodes
    decode_tables = np.zeros((len(lengths), width), np.int32)
    decode_tables[: len(decodes)] = tables[len(chunks) :]
    chunk_tables = np.zeros((8, width), np.int32)
    chunk_tables[: len(chunks)] = tables[: len(chunks)]
    return (
        tables,
        Tiles(jnp.int32(count), *map(jnp.asarray, tiles), jnp.asarray(chunk_tables)),
        Decodes(jnp.int32(token), jnp.asarray(lengths), jnp.asarray(decode_tables)),
    )


@pytest.mark.parametrize("implementation", ["xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 70)), max_size=3),
    decodes=st.lists(st.integers(1, 300), max_size=5),
    heads=st.sampled_from([(4, 4), (6, 2), (9, 3), (8, 1)]),
    head_dim=st.sampled_from([16, 64]),
    block_size=st.sampled_from([16, 32]),
    seed=st.integers(0, 2**31),
)
def test_matches_reference(
    implementation, dtype, chunks, decodes, heads, head_dim, block_size, seed
):
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    num_tokens = 256
    width = 20
    num_blocks = 120
    tables, tiles, rows = build_step(
        rng, chunks, decodes, num_tokens, block_size, width, num_blocks
    )
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    written = np.zeros(shape[:2], bool)
    stops = [start + n for start, n in chunks] + list(decodes)
    for table, stop in zip(tables, stops, strict=True):
        for position in range(stop):
            written[table[position // block_size], position % block_size] = True
    # Slots that nobody wrote are poisoned: they must not reach any output.
    k_pool, v_pool = (
        jnp.asarray(np.where(written[..., None, None], rng.normal(size=shape), np.nan), dtype)
        for _ in range(2)
    )
    q = jnp.asarray(rng.normal(size=(num_tokens, num_heads, head_dim)), dtype)
    attend = jax.jit(attention.device_attention(implementation))
    out = np.asarray(attend(q, k_pool, v_pool, tiles, rows).astype(jnp.float32))

    expected = np.zeros(out.shape)
    token = 0
    as64 = [np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k_pool, v_pool)]
    spans = [(start, n) for start, n in chunks] + [(length - 1, 1) for length in decodes]
    for table, (start, n) in zip(tables, spans, strict=True):
        expected[token : token + n] = attention_ref.attend(
            as64[0][token : token + n], as64[1], as64[2], table, start + np.arange(n)
        )
        token += n
    assert np.isfinite(out).all()
    assert not out[token:].any()
    error = np.linalg.norm(out - expected) / max(np.linalg.norm(expected), 1e-9)
    assert error < TOLERANCE[dtype]


def test_padding_rows_are_dropped_by_append():
    pool = jnp.zeros((2, 16, 1, 8))
    rows = jnp.ones((3, 1, 8))
    out = attention.append(pool, jnp.asarray([5, 32, 32]), rows)
    assert float(out.sum()) == 8
    assert float(out[0, 5].sum()) == 8
