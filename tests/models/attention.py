"""Plain dense causal attention for the `attend` hook, and the logits that a model gives with it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from neojax.models.llama import Llama


def causal_attend(
    layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None = None
) -> jax.Array:
    """q [T, N, H], k and v [T, K, H] -> [T, N, H]; every token sees itself and those before, of
    which the last `window`."""
    num_tokens, num_heads, head_dim = q.shape
    groups = num_heads // k.shape[1]
    k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))
    scores = jnp.einsum("tnh,snh->nts", q, k, preferred_element_type=jnp.float32)
    visible = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    if window is not None:
        visible &= ~jnp.tril(visible, -window)
    visible = visible[None]
    weights = jax.nn.softmax(jnp.where(visible, scores * head_dim**-0.5, -jnp.inf), axis=-1)
    return jnp.einsum("nts,snh->tnh", weights.astype(v.dtype), v)


def logits_of(model: Llama, ids: np.ndarray, first_position: int = 0) -> np.ndarray:
    """float32 [T, V] of a prompt. Compiled, since tiny operations one by one take longer."""
    graphdef, state = nnx.split(model)
    attend = functools.partial(causal_attend, window=model.config.sliding_window)

    @jax.jit
    def forward(state, ids, positions):
        return nnx.merge(graphdef, state)(ids, positions, attend)

    positions = np.arange(first_position, first_position + len(ids), dtype=np.int32)
    return np.asarray(forward(state, ids, positions))
