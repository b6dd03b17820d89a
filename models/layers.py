"""The two layers every decoder here is made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Root-mean-square norm. Reduces in float32 whatever the parameters' type."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        weight = jnp.expand_dims(self.weight[...].astype(jnp.float32), range(x.ndim - 1))
        return (wide * scale * weight).astype(x.dtype)


class Linear(nnx.Module):
    """A projection. Weight [out, in], as checkpoints store it.

    That order needs no transpose on load, and on the CPU backend it is a quarter faster from 16
    tokens on.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        use_bias: bool = False,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.weight = nnx.Param(random_weight((out_size, in_size), dtype, rngs))
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype)) if use_bias else None

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T O"]:
        y = project(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None, :]


def project(
    x: Float[Array, "T D"], weight: Float[Array, "O D"], out_dtype: DTypeLike | None = None
) -> Float[Array, "T O"]:
    """x times the transposed weight, summed in float32, as `out_dtype` (default: x's)."""
    # GPUs would multiply float32 in TF32 (10 bits of mantissa) without being asked.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=out_dtype or x.dtype,
    )


def random_weight(shape: tuple[int, ...], dtype: DTypeLike, rngs: nnx.Rngs) -> Float[Array, "..."]:
    """Normal values of deviation 0.02, as in a fresh Llama."""
    return jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(0.02, dtype)
