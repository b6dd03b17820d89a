"""What `LLM.generate` returns, in vLLM's words."""

from __future__ import annotations

import dataclasses
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; None for end of sequence."""


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers (always one today)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def finished(self) -> bool:
        """Whether every answer is complete."""
        return all(output.finish_reason is not None for output in self.outputs)
