"""Every device attention implementation against the float64 reference, over random shapes."""

from __future__ import annotations

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from neojax.ops import (
    attention,
    attention_case,
    attention_cudnn,
    attention_pallas,
    attention_xla,
    paged_append,
    paged_decode,
    paged_prefill,
)
from neojax.ops.attention import Geometry
from tests.ops.gap import step_with_a_gap

TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}  # relative L2
IMPLEMENTATIONS = {
    "xla": attention_xla.attend,
    "xla-static": functools.partial(attention_xla.attend, is_static=True),
    "pallas": functools.partial(attention_pallas.attend, interpret=True),
}


JITTED = {
    name: jax.jit(attend, static_argnames="window") for name, attend in IMPLEMENTATIONS.items()
}
GEOMETRIES = [
    Geometry(4, 4, 16, 16, "float32"),
    Geometry(9, 3, 16, 32, "float32"),
    Geometry(8, 1, 64, 16, "bfloat16"),
    Geometry(12, 2, 16, 32, "bfloat16"),
    Geometry(4, 2, 16, 16, "float32", window=40),
]


# One shape per geometry, so that examples share its compiled program.
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 50)), max_size=3),
    decodes=st.lists(st.integers(1, 150), max_size=4),
    seed=st.integers(0, 2**31),
)
def test_matches_reference(implementation, geometry, chunks, decodes, seed):
    case = attention_case.make(
        np.random.default_rng(seed),
        geometry,
        chunks,
        decodes,
        num_tokens=160,
        table_width=10,
        num_blocks=80,
    )
    out = JITTED[implementation](*case.arguments, window=geometry.window)
    assert case.error(out) < TOLERANCE[geometry.dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_of_decodes_alone_needs_no_tiles(implementation):
    case = attention_case.make(
        np.random.default_rng(1),
        Geometry(4, 2, 16, 16, "float32"),
        [],
        [5, 64, 33],
        num_tokens=8,
        table_width=4,
        num_blocks=12,
    )
    out = IMPLEMENTATIONS[implementation](case.q, case.k_pool, case.v_pool, None, case.decodes)
    assert case.error(out) < TOLERANCE["float32"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_of_chunks_alone_needs_no_decodes(implementation):
    case = attention_case.make(
        np.random.default_rng(2),
        Geometry(4, 2, 16, 16, "float32"),
        [(20, 33), (0, 2)],
        [],
        num_tokens=40,
        table_width=4,
        num_blocks=12,
    )
    out = IMPLEMENTATIONS[implementation](case.q, case.k_pool, case.v_pool, case.tiles, None)
    assert case.error(out) < TOLERANCE["float32"]


@pytest.mark.parametrize("window", [None, 1, 63, 128, 300])
def test_spans_of_one_sequence_are_merged(window):
    case = attention_case.make(
        np.random.default_rng(3),
        Geometry(4, 2, 16, 16, "float32", window),
        [],
        [1, 700, 64, 129],
        num_tokens=8,
        table_width=45,
        num_blocks=60,
    )
    for spans in (1, 2, 5):
        out = paged_decode.decode(
            case.q,
            case.k_pool,
            case.v_pool,
            case.decodes,
            window=window,
            spans=spans,
            interpret=True,
        )
        assert case.error(out) < TOLERANCE["float32"]


@pytest.mark.parametrize("decodes", [[], [5, 64, 33]])
def test_decode_rows_take_their_places_among_other_tokens(decodes):
    case = attention_case.make(
        np.random.default_rng(6),
        Geometry(4, 2, 16, 16, "float32"),
        [(20, 33), (0, 2)],
        decodes,
        num_tokens=48,
        table_width=4,
        num_blocks=20,
    )
    prefilled = paged_prefill.prefill(case.q, case.k_pool, case.v_pool, case.tiles, interpret=True)
    out = paged_decode.decode(
        case.q, case.k_pool, case.v_pool, case.decodes, prefilled, interpret=True
    )
    assert case.error(out) < TOLERANCE["float32"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_other_tokens_may_lie_between_chunks(implementation):
    case, tiles = step_with_a_gap(Geometry(4, 2, 16, 16, "float32"))
    out = IMPLEMENTATIONS[implementation](case.q, case.k_pool, case.v_pool, tiles, None)
    assert case.error(out.at[40:70].set(0.0)) < TOLERANCE["float32"]


def test_chunks_are_found_in_their_tiles():
    _, tiles = step_with_a_gap(Geometry(4, 2, 16, 16, "float32"))
    chunks = attention_cudnn.chunks_of(tiles, 128)
    assert chunks.token.tolist() == [0, 70] + [128] * 6
    assert chunks.length.tolist() == [40, 25] + [0] * 6
    assert chunks.is_first.tolist() == [True] + [False] * 7
    assert chunks.stop == 95


def test_a_named_implementation_that_cannot_run_is_an_error():
    with pytest.raises(ValueError, match="'cudnn' was asked for but cannot run here"):
        attention.device_attention("cudnn", Geometry(4, 2, 64, 16, "bfloat16"))


def test_the_choice_on_the_cpu_is_silent(caplog):
    assert attention.device_attention(None, Geometry(4, 2, 64, 16, "float32")).name == "xla"
    assert not caplog.records


APPEND_GEOMETRIES = [
    Geometry(4, 4, 16, 16, "float32"),
    Geometry(9, 3, 16, 48, "float16"),
    Geometry(8, 1, 64, 16, "bfloat16"),
    Geometry(12, 6, 128, 32, "bfloat16"),
]


@pytest.mark.parametrize("is_apart", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 160])
@pytest.mark.parametrize("geometry", APPEND_GEOMETRIES, ids=str)
def test_the_kernel_writes_what_a_scatter_writes(geometry, num_tokens, is_apart):
    case = attention_case.make(
        np.random.default_rng(num_tokens),
        geometry,
        [(0, num_tokens)],
        [],
        num_tokens=num_tokens,
        table_width=10,
        num_blocks=11,
    )
    for elements in (paged_append.ELEMENTS, 64):
        append = functools.partial(
            paged_append.append, is_apart=is_apart, elements=elements, interpret=True
        )
        assert attention_case.writes_alike(append, case)


def test_a_write_to_another_slot_is_noticed():
    case = attention_case.make(
        np.random.default_rng(0),
        APPEND_GEOMETRIES[0],
        [(0, 9)],
        [],
        num_tokens=9,
        table_width=4,
        num_blocks=4,
    )

    def shifted(k_pool, v_pool, slots, k, v):
        return attention.append(k_pool, v_pool, slots + 1, k, v)

    assert not attention_case.writes_alike(shifted, case)


def test_padding_rows_are_dropped_by_append():
    pool = jnp.zeros((2, 16, 1, 8))
    rows = jnp.ones((3, 1, 8))
    k, v = attention.append(pool, pool, jnp.asarray([5, 32, 32]), rows, 2 * rows)
    assert (float(k.sum()), float(v.sum())) == (8, 16)
    assert (float(k[0, 5].sum()), float(v[0, 5].sum())) == (8, 16)
