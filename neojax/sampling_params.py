"""What a request asks of generation. Shared by the HTTP process, the engine and `LLM`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Placement = Literal["auto", "device", "host"]

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 300
MAX_PRIORITY = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request, in vLLM's words.

    Raises ValueError naming the field when a value cannot be honoured.

    Logits are changed in this order: repetition, frequency and presence penalties; logit_bias;
    what min_tokens and json_schema forbid; temperature; min_p; top_k; top_p.
    """

    n: int = 1
    """Answers to each prompt. Each draws with a seed of its own: answer i with seed + i."""
    max_tokens: int | None = 16
    """Most tokens to generate; None means up to the end of the context, 0 only reads the prompt."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before so many tokens."""
    temperature: float = 1.0
    """0 is greedy. Values below 1e-5 are treated as 0 (a division would overflow)."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to top_p."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the likeliest."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the output holds."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that the output holds it."""
    repetition_penalty: float = 1.0
    """Divides positive logits, multiplies negative ones, of tokens in the prompt or the output."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Added to the logits of these tokens, -100 to 100."""
    logprobs: int | None = None
    """Log probabilities of each token and of so many of the likeliest, up to 20. They are those of
    the model: of its logits as they are, in float32."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
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
    json_schema: str | None = None
    """Only text that is JSON of this schema (as JSON text; a mapping is taken too)."""
    priority: int = 0
    """Requests of a lower number start first, and give up their memory last."""
    kv_placement: Placement = "auto"
    """Where the request's KV cache lives: the scheduler's choice, or forced."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        if self.json_schema is not None and not isinstance(self.json_schema, str):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        for name, ok, rule in self._rules():
            if not ok:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        yield "n", self.n >= 1, "at least 1"
        yield "max_tokens", self.max_tokens is None or self.max_tokens >= 0, "0 or more"
        most = math.inf if self.max_tokens is None else self.max_tokens
        yield "min_tokens", 0 <= self.min_tokens <= most, "between 0 and max_tokens"
        yield (
            "min_tokens",
            self.min_tokens == 0 or self.json_schema is None,
            "0 with json_schema, where the grammar says when the text ends",
        )
        yield "temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"
        yield "top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"
        yield "top_k", self.top_k >= -1, "-1, 0 or positive"
        yield "min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"
        for name in ("presence_penalty", "frequency_penalty"):
            yield name, -2.0 <= getattr(self, name) <= 2.0, "between -2 and 2"
        yield "repetition_penalty", 0.0 < self.repetition_penalty <= 10, "above 0 and at most 10"
        biases: Any = self.logit_bias
        yield "logit_bias", len(biases) <= MAX_LOGIT_BIASES, f"of at most {MAX_LOGIT_BIASES} tokens"
        yield "logit_bias", all(-100 <= b <= 100 for b in biases.values()), "between -100 and 100"
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(self, name)
            ok = number is None or 0 <= number <= MAX_LOGPROBS
            yield name, ok, f"between 0 and {MAX_LOGPROBS}"
        yield "seed", self.seed is None or 0 <= self.seed <= MAX_SEED, f"between 0 and {MAX_SEED}"
        yield "stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings"
        yield "stop", all(self.stop), "non-empty strings"
        yield (
            "stop_token_ids",
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            f"at most {MAX_STOP_TOKEN_IDS} tokens",
        )
        yield "priority", abs(self.priority) <= MAX_PRIORITY, f"at most {MAX_PRIORITY} in size"
        placements = ("auto", "device", "host")
        yield "kv_placement", self.kv_placement in placements, "auto, device or host"

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without drawing."""
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature, top_k and top_p decides the next token."""
        return (
            self.min_tokens > 0
            or self.min_p > 0.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or bool(self.logit_bias)
            or self.json_schema is not None
        )
