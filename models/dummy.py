"""Random parameters made on the device, for benchmarks and tests."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

from neojax.models.parameters import ParamPath

DEVIATION = 0.02  # that of a fresh Llama


def random_parameters(
    shapes: Mapping[ParamPath, tuple[int, ...]], *, dtype: DTypeLike, seed: int
) -> dict[ParamPath, jax.Array]:
    """Matrices of uniform values, norms of ones, biases of zeros.

    The same for the same seed in every type. Parameters of one shape share a program, so that a
    model of any depth compiles a handful.
    """
    fill = jax.jit(_uniform, static_argnums=(1, 2))
    arrays = {}
    for path, shape in shapes.items():
        if len(shape) == 1:
            arrays[path] = jnp.full(shape, 0 if path[-1] == "bias" else 1, dtype)
        else:
            arrays[path] = fill(np.uint32(zlib.crc32(repr((seed, path)).encode())), shape, dtype)
    return arrays


def _uniform(
    seed: UInt32[Array, ""], shape: tuple[int, ...], dtype: DTypeLike
) -> Float[Array, "..."]:
    """A hash of each element's index: an order of magnitude faster than threefry on a CPU, to
    compile as to run, and random enough to look at."""
    row = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
    bits = row * np.uint32(shape[1]) + jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    bits = _mixed(_mixed(bits) ^ seed)
    unit = (bits >> 8).astype(jnp.float32) * 2.0**-24  # [0, 1)
    return ((2.0 * unit - 1.0) * (DEVIATION * 3**0.5)).astype(dtype)


def _mixed(bits: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The finalizer of MurmurHash3: every bit of the result depends on every bit."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
