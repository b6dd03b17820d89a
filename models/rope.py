"""Rotary position embedding in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from neojax.models.config import ModelConfig
from neojax.models.rope_scaling import (
    DynamicRopeScaling,
    attention_factor,
    inverse_frequencies,
)


def angles(positions: Int[Array, "T"], config: ModelConfig) -> Float[Array, "T pairs"]:
    """How far each pair of a head turns at each position.

    In float32: bfloat16 cannot tell positions apart beyond 256.
    """
    c = config
    frequencies = inverse_frequencies(
        c.head_dim, c.rope_theta, c.rope_scaling, c.max_position_embeddings
    )
    turns = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
    if isinstance(c.rope_scaling, DynamicRopeScaling):
        turns *= _dynamic_shares(positions, c.rope_scaling, c.head_dim)
    return turns


def rotate(
    heads: Float[Array, "T N H"], turns: Float[Array, "T pairs"], config: ModelConfig
) -> Float[Array, "T N H"]:
    """Turn each pair (i, i + H/2) of a head by its angle; stretch by the scaling's factor."""
    factor = attention_factor(config.rope_scaling)
    cos = (jnp.cos(turns) * factor)[:, None, :]  # [T, 1, H/2]
    sin = (jnp.sin(turns) * factor)[:, None, :]
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = jax.lax.concatenate(
        [first * cos - second * sin, second * cos + first * sin], dimension=2
    )
    return turned.astype(heads.dtype)


def _dynamic_shares(
    positions: Int[Array, "T"], scaling: DynamicRopeScaling, head_dim: int
) -> Float[Array, "T pairs"]:
    """What is left of each frequency once theta has grown: theta * growth**(H/(H-2)) to the power
    of -2i/H is the frequency times growth**(-2i/(H-2)). The first, the fastest, stays exact."""
    original = scaling.original_max_position_embeddings
    length = jnp.maximum(positions + 1, original).astype(jnp.float32)
    growth = scaling.factor * length / original - (scaling.factor - 1)  # [T], 1 or more
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / max(head_dim - 2, 1)
    return jnp.exp(-jnp.log(growth)[:, None] * jnp.asarray(exponents)[None, :])
