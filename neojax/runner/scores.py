"""Log probabilities of tokens: computed on the device, read on the host."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from neojax.logprobs import MIN_LOGPROB, TokenLogprobs
from neojax.sampling_params import MAX_LOGPROBS


class Scores(NamedTuple):
    """Of one token per row, and of the row's likeliest."""

    token_id: Int[Array, "S"]
    logprob: Float[Array, "S"]
    rank: Int[Array, "S"]
    top_ids: Int[Array, "S top"]
    top_logprobs: Float[Array, "S top"]

    def start_copy(self) -> None:
        """Begin to copy to the host."""
        for array in self:
            array.copy_to_host_async()


@jax.named_scope("scores")
def score(logits: Float[Array, "S V"], tokens: Int[Array, "S"]) -> Scores:
    """Log softmax in float32 at the tokens and at the likeliest of each row."""
    total = jax.nn.logsumexp(logits, axis=-1)
    own = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1)  # [S, 1]
    rank = 1 + (logits > own).sum(axis=-1, dtype=jnp.int32)
    top, top_ids = jax.lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    return Scores(tokens, own[:, 0] - total, rank, top_ids, top - total[:, None])


def read(scores: Scores, wanted: list[tuple[int, int]]) -> list[TokenLogprobs]:
    """Wait for the scores; those of (row, number of the likeliest) pairs."""
    token_ids, logprobs, ranks, top_ids, top_logprobs = (np.asarray(array) for array in scores)
    logprobs, top_logprobs = (np.maximum(x, MIN_LOGPROB) for x in (logprobs, top_logprobs))
    return [
        TokenLogprobs(
            int(token_ids[row]),
            float(logprobs[row]),
            int(ranks[row]),
            top_ids[row, :number].tolist(),
            top_logprobs[row, :number].tolist(),
        )
        for row, number in wanted
    ]
