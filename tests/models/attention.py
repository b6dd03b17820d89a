"""The plain dense causal attention that model tests plug into the `attend` hook."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def causal_attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """q [T, N, H], k and v [T, K, H] -> [T, N, H]; every token sees itself and those before."""
    num_tokens, num_heads, head_dim = q.shape
    groups = num_heads // k.shape[1]
    k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))
    scores = jnp.einsum("tnh,snh->nts", q, k, preferred_element_type=jnp.float32)
    visible = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))[None]
    weights = jax.nn.softmax(jnp.where(visible, scores * head_dim**-0.5, -jnp.inf), axis=-1)
    return jnp.einsum("nts,snh->tnh", weights.astype(v.dtype), v)
