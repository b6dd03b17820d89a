"""What `LLM.generate` returns, in vLLM's words."""

from __future__ import annotations

import dataclasses
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was at its place."""

    logprob: float
    rank: int
    """1 for the likeliest."""
    decoded_token: str


Logprobs = dict[int, Logprob]
"""At one place: the token that stands there, then the likeliest, by id."""


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; None for end of sequence."""
    logprobs: list[Logprobs] | None = None
    """Of each token, where they were asked for."""


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers, as many as `n` says."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprobs | None] | None = None
    """Of each prompt token, where they were asked for; None for the first."""

    @property
    def finished(self) -> bool:
        """Whether every answer is complete."""
        return all(output.finish_reason is not None for output in self.outputs)
