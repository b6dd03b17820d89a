"""Rotary position embedding in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rotate(
    heads: Float[Array, "T N H"],
    positions: Int[Array, "T"],
    inverse_frequencies: np.ndarray,
    factor: float = 1.0,
) -> Float[Array, "T N H"]:
    """Turn each pair (i, i + H/2) of a head by position times frequency i; stretch by factor.

    In float32: bfloat16 cannot tell positions apart beyond 256.
    """
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inverse_frequencies)[None, :]
    cos = (jnp.cos(angles) * factor)[:, None, :]  # [T, 1, H/2]
    sin = (jnp.sin(angles) * factor)[:, None, :]
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = jax.lax.concatenate(
        [first * cos - second * sin, second * cos + first * sin], dimension=2
    )
    return turned.astype(heads.dtype)
