"""Choosing tokens on the device: greedy, temperature, min-p, top-k and top-p, seeds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from neojax.runner.step_meta import Sampling

NOT_FINITE = -1
"""Stands for the token of a row whose logits overflowed: it has none."""


def greedy(logits: Float[Array, "S V"]) -> Int[Array, "S"]:
    """The most likely token of each row; the first of equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def checked(
    tokens: Int[Array, "S"], logits: Float[Array, "S V"], likeliest: Int[Array, "S"]
) -> Int[Array, "S"]:
    """The tokens, but NOT_FINITE where the logits are not: argmax finds a NaN first, then inf."""
    largest = jnp.take_along_axis(logits, likeliest[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(largest), tokens, NOT_FINITE)


@jax.named_scope("sampling")
def sample(
    logits: Float[Array, "S V"], params: Sampling, min_p: Float[Array, "S"] | None = None
) -> Int[Array, "S"]:
    """A token per row; rows of temperature 0 are greedy.

    The draw depends on the request's seed and the token's position alone, so it is the same
    whatever else is in the batch.
    """
    likeliest = greedy(logits)
    scaled = logits / jnp.maximum(params.temperature, 1e-5)[:, None]
    kept = scaled
    if min_p is not None:
        kept = jnp.where(keep_min_p(scaled, min_p), scaled, -jnp.inf)
    kept = jnp.where(keep_top_k(kept, params.top_k), kept, -jnp.inf)
    kept = jnp.where(keep_top_p(jax.nn.softmax(kept, axis=-1), params.top_p), kept, -jnp.inf)

    def noise(seed: Int[Array, "2"], position: Int[Array, ""]) -> Float[Array, "V"]:
        key = jax.random.wrap_key_data(seed.astype(jnp.uint32), impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), logits.shape[-1:])

    # The maximum of logits plus Gumbel noise is a draw from their softmax.
    drawn = greedy(kept + jax.vmap(noise)(params.seed, params.position))
    return checked(jnp.where(params.temperature > 0, drawn, likeliest), logits, likeliest)


def keep_min_p(logits: Float[Array, "S V"], min_p: Float[Array, "S"]) -> Bool[Array, "S V"]:
    """Tokens at least min_p times as likely as the row's likeliest; 0 keeps everything."""
    return logits >= (logits.max(axis=-1) + jnp.log(min_p))[:, None]


def keep_top_k(logits: Float[Array, "S V"], top_k: Int[Array, "S"]) -> Bool[Array, "S V"]:
    """The k largest of each row, and all equals of the last; 0 keeps everything."""
    keys = _sortable(logits)
    count = jnp.where(top_k > 0, top_k, logits.shape[-1]).astype(jnp.float32)
    return keys >= _threshold(keys, jnp.ones_like(logits), count)[:, None]


def keep_top_p(probs: Float[Array, "S V"], top_p: Float[Array, "S"]) -> Bool[Array, "S V"]:
    """The smallest set of likeliest tokens whose mass reaches top_p; 1 keeps everything."""
    keys = _sortable(probs)
    return keys >= _threshold(keys, probs, top_p)[:, None]


def _sortable(x: Float[Array, "S V"]) -> UInt[Array, "S V"]:
    """Unsigned integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(
    keys: UInt[Array, "S V"], weights: Float[Array, "S V"], target: Float[Array, "S"]
) -> UInt[Array, "S"]:
    """The largest key from which upwards the weights sum to the target or more; 0 if none.

    Found bit by bit: 32 passes over the row, no sort (a sort of 50k logits costs far more).
    """

    def one_bit(i: Int[Array, ""], found: UInt[Array, "S"]) -> UInt[Array, "S"]:
        candidate = found | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        mass = jnp.where(keys >= candidate[:, None], weights, 0.0).sum(axis=-1)
        return jnp.where(mass >= target, candidate, found)

    return jax.lax.fori_loop(0, 32, one_bit, jnp.zeros(keys.shape[:1], jnp.uint32))
