"""tests/shape_checks.py: that a wrong shape really is caught while the tests run."""

from __future__ import annotations

import importlib
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

from tests import shape_checks

SOURCE = """
    from __future__ import annotations

    from typing import TYPE_CHECKING

    if TYPE_CHECKING:
        from jaxtyping import Array, Float, Int


    def scale(
        x: Float[Array, "T D"], factors: Float[Array, "T"], power: float
    ) -> Float[Array, "T D"]:
        return x * factors[:, None] ** power


    def first(ids: Int[Array, "T"]) -> Int[Array, "T"]:
        return ids[:1]
"""


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """A module of neojax.ops that exists for one test only."""
    import neojax.ops

    name = "shapes_example"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(SOURCE), encoding="utf-8")
    monkeypatch.setattr(neojax.ops, "__path__", [*neojax.ops.__path__, str(tmp_path)])
    yield __import__(f"neojax.ops.{name}", fromlist=["scale"])
    del sys.modules[f"neojax.ops.{name}"]


def test_right_shapes_pass_and_an_int_counts_as_a_float(checked):
    assert checked.scale(jnp.ones((3, 2)), jnp.ones(3), 2).shape == (3, 2)


def test_an_argument_of_the_wrong_shape_is_caught(checked):
    with pytest.raises(Exception, match="factors"):
        checked.scale(jnp.ones((3, 2)), jnp.ones(4), 1.0)


def test_a_result_of_the_wrong_shape_is_caught_under_jit_too(checked):
    with pytest.raises(Exception, match="first"):
        jax.jit(checked.first)(jnp.arange(3))


@pytest.mark.parametrize("name", ["neojax.models.llama", "neojax.ops.attention"])
def test_the_array_code_of_neojax_is_checked(name: str):
    module = importlib.import_module(name)
    assert isinstance(module.__spec__.loader, shape_checks.Loader)
