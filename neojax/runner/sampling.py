"""Choosing tokens on the device: greedy, temperature, min-p, top-k and top-p, seeds."""

from __future__ import annotations

from collections.abc import Callable

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
    return keys >= _threshold(keys, lambda keys: jnp.ones(keys.shape), count)[:, None]


def keep_top_p(probs: Float[Array, "S V"], top_p: Float[Array, "S"]) -> Bool[Array, "S V"]:
    """The smallest set of likeliest tokens whose mass reaches top_p; 1 keeps everything."""
    keys = _sortable(probs)
    return keys >= _threshold(keys, _probability, top_p)[:, None]


def _sortable(x: Float[Array, "S V"]) -> UInt[Array, "S V"]:
    """Unsigned integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _probability(keys: UInt[Array, "S V"]) -> Float[Array, "S V"]:
    """The floats of which these are the keys, none of them negative."""
    return jax.lax.bitcast_convert_type(keys ^ jnp.uint32(1 << 31), jnp.float32)


def bits_per_pass() -> int:
    """Of a threshold: a GPU waits for the row's bytes, a CPU for every comparison."""
    return 1 if jax.default_backend() == "cpu" else 4


def _threshold(
    keys: UInt[Array, "S V"],
    weigh: Callable[[UInt[Array, "S V"]], Float[Array, "S V"]],
    target: Float[Array, "S"],
) -> UInt[Array, "S"]:
    """The largest key from which upwards the weights sum to the target or more; 0 if none.

    Found by a few bits in each pass over the row: a sort of 50k logits costs far more. Weights are
    made of the keys, so that a pass reads nothing else.
    """
    num_bits = bits_per_pass()

    def more_bits(i: Int[Array, ""], found: UInt[Array, "S"]) -> UInt[Array, "S"]:
        shift = jnp.uint32(32 - num_bits) - jnp.uint32(num_bits) * i.astype(jnp.uint32)
        weights = weigh(keys)
        above = tuple(
            jnp.where(keys >= (found | (jnp.uint32(digit) << shift))[:, None], weights, 0.0)
            for digit in range(1, 1 << num_bits)
        )
        # One reduction of many operands: of many reductions XLA makes as many small kernels.
        zeros = (jnp.float32(0),) * len(above)
        masses = jax.lax.reduce(above, zeros, lambda a, b: jax.tree.map(jnp.add, a, b), (1,))
        # Masses fall as digits rise, so the largest digit that reaches the target is their number.
        digit = sum((mass >= target).astype(jnp.uint32) for mass in masses)
        return found | (digit << shift)

    none = jnp.zeros(keys.shape[:1], jnp.uint32)
    return jax.lax.fori_loop(0, 32 // num_bits, more_bits, none)
