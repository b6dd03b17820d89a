"""How likely tokens were: measured by the runner, passed on by engine, server and `LLM`."""

from __future__ import annotations

import dataclasses

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no word for."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of the prompt or the output among the likeliest at its place.

    Log probabilities are the model's own, of its logits before anything changes them.
    """

    token_id: int
    logprob: float
    rank: int  # 1 for the likeliest
    top_ids: list[int]  # the likeliest, in descending order; as many as were asked for
    top_logprobs: list[float]
