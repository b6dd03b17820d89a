"""The fast device attention on a real GPU against the float64 reference."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest

from neojax.ops import attention, attention_case, attention_choice
from neojax.ops.attention import Geometry, Implementation
from tests.ops.gap import step_with_a_gap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

TOLERANCE = 5e-3  # relative L2, bfloat16 operands
GEOMETRIES = [
    Geometry(32, 8, 128, 16, "bfloat16"),
    Geometry(64, 8, 128, 64, "bfloat16"),
    Geometry(9, 3, 64, 32, "float16"),
    Geometry(4, 4, 128, 48, "bfloat16"),
    Geometry(32, 8, 128, 16, "bfloat16", window=200),
    Geometry(9, 3, 64, 32, "float16", window=30),
]
STEPS = {  # chunks (start, tokens), contexts of decode rows
    "chunks and decodes": ([(0, 300), (500, 90), (33, 1), (0, 64)], [1, 500, 17, 700]),
    "decodes": ([], [800, 1, 399]),
    "chunks": ([(0, 512), (700, 88)], []),
    "nothing": ([], []),
}


@functools.cache
def jitted(implementation: Implementation, geometry: Geometry) -> Callable[..., jax.Array]:
    """One program for all steps of a geometry."""
    assert attention.device_attention(implementation, geometry).name == implementation
    return jax.jit(attention_choice.load(implementation, geometry.window, is_test=True))


# So many rows that a program attends for all of a row's keys, or few.
@pytest.mark.parametrize("max_rows", [512, 8])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("implementation", ["cudnn", "pallas", "xla"])
def test_matches_reference(implementation, geometry, step, max_rows):
    case = attention_case.make(
        np.random.default_rng(),
        geometry,
        *STEPS[step],
        num_tokens=600,
        table_width=-(-800 // geometry.block_size),
        num_blocks=200,
        max_rows=max_rows,
    )
    assert case.error(jitted(implementation, geometry)(*case.arguments)) < TOLERANCE


@pytest.mark.parametrize("implementation", ["cudnn", "pallas", "xla"])
def test_other_tokens_may_lie_between_chunks(implementation):
    case, tiles = step_with_a_gap(GEOMETRIES[0])
    attend = jax.jit(attention_choice.load(implementation, is_test=True))
    out = attend(case.q, case.k_pool, case.v_pool, tiles, None, case.new)
    assert case.error(out.at[40:70].set(0.0)) < TOLERANCE


def test_a_step_of_decodes_alone_needs_no_tiles():
    geometry = GEOMETRIES[0]
    case = attention_case.make(
        np.random.default_rng(5),
        geometry,
        [],
        [700, 3, 64, 65],
        num_tokens=8,
        table_width=48,
        num_blocks=120,
    )
    attend = jax.jit(attention.device_attention(None, geometry))
    out = attend(case.q, case.k_pool, case.v_pool, None, case.decodes)
    assert case.error(out) < TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 7, 300, 2048])
@pytest.mark.parametrize("geometry", GEOMETRIES[:4], ids=str)
@pytest.mark.parametrize("implementation", ["cudnn", "pallas"])
def test_keys_and_values_are_written_as_xla_writes_them(implementation, geometry, num_tokens):
    width = -(-num_tokens // geometry.block_size)
    case = attention_case.make(
        np.random.default_rng(),
        geometry,
        [(0, num_tokens)],
        [],
        num_tokens=num_tokens,
        table_width=width,
        num_blocks=width + 3,
    )
    append = jax.jit(attention_choice.load_append(implementation))
    assert attention_case.writes_alike(append, case)


def test_float32_is_left_to_xla(caplog):
    geometry = GEOMETRIES[0]._replace(dtype="float32")
    assert attention.device_attention(None, geometry).name == "xla"
    assert "it takes bfloat16 and float16, not float32" in caplog.text
