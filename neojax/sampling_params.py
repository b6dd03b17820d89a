"""What a request asks of generation. Shared by the HTTP process, the engine and `LLM`."""

from __future__ import annotations

import dataclasses
from typing import Literal

Placement = Literal["auto", "device", "host"]

MAX_STOP_STRINGS = 16
MAX_SEED = 2**63 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request, in vLLM's words.

    Raises ValueError naming the field when a value cannot be honoured.
    """

    max_tokens: int | None = 16
    """Most tokens to generate; None means up to the end of the context."""
    temperature: float = 1.0
    """0 is greedy. Values below 1e-5 are treated as 0 (a division would overflow)."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to top_p."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    seed: int | None = None
    """Makes the request reproducible whatever else is in the batch."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends at the first of these tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    kv_placement: Placement = "auto"
    """Where the request's KV cache lives: the scheduler's choice, or forced."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for name, ok, rule in (
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= -1, "-1, 0 or positive"),
            ("seed", self.seed is None or 0 <= self.seed <= MAX_SEED, f"between 0 and {MAX_SEED}"),
            ("stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings"),
            ("stop", all(self.stop), "non-empty strings"),
            (
                "kv_placement",
                self.kv_placement in ("auto", "device", "host"),
                "auto, device or host",
            ),
        ):
            if not ok:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without drawing."""
        return self.temperature < 1e-5 or self.top_k == 1
