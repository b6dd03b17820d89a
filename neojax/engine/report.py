"""What the engine tells of itself and its requests, for `LLM` and for the link to HTTP alike.

Plain dataclasses: the offline API must not need the link's libraries.
"""

from __future__ import annotations

import dataclasses

from neojax.logprobs import TokenLogprobs


@dataclasses.dataclass(slots=True)
class RequestTokens:
    """New tokens of one request.

    finish_reason: None while it runs, then stop, length, abort, error, or rejected when the
    request could never run. stop_reason: the stop token's id, or None for EOS. message: the
    error's text when finish_reason is error or rejected. logprobs: of each new token;
    prompt_logprobs: of each prompt token (None for the first), with the first new token. Both only
    where asked for.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    placement: str = "device"
    message: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Distribution:
    """How many values were at most each bound and above the one before; last, above all."""

    bounds: list[float]
    counts: list[int]  # one more than bounds
    total: float  # sum of the values


@dataclasses.dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over all completed steps. Gains: how much longer the device alone would have taken."""

    seconds: dict[str, float]  # by mode, wall time
    host_idle_s: float  # of steps with host rows, while no host attention ran
    swap_bytes: dict[str, int]  # by direction, in or out
    tokens: Distribution  # rows of a step: prompt tokens and decodes
    queue_s: Distribution  # of requests, arrival to first step
    prefill_s: Distribution  # first step to first token
    relative_error: Distribution  # |predicted / measured - 1| of a step's time
    predicted_gain: float | None  # of the last steps with host rows; None: not predicted
    measured_gain: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine.

    Counters only grow. Steps are counted by mode, requests and KV use by placement or pool.
    """

    num_running_device: int
    num_running_host: int
    num_waiting: int
    device_kv_usage: float  # 0..1
    host_kv_usage: float  # 0..1
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    steps_device_only: int
    steps_pipelined: int
    steps_rolling: int
    num_compiles_after_ready: int
    requests_placed_device: int
    requests_placed_host: int
    last_step_unix_s: float
    host_attention_busy_s: float = 0.0
    host_attention_bytes: int = 0  # K and V that host attention has read
    num_not_finite: int = 0  # requests ended because their logits were not finite
    requests_swapped_in: int = 0
    requests_swapped_out: int = 0
    steps_lost: int = 0  # with host rows, longer than the device alone would have taken
    steps_lost_s: float = 0.0  # seconds that these took longer
    correction_device_only: float = 1.0  # measured over predicted time of such steps
    correction_pipelined: float = 1.0
    correction_rolling: float = 1.0
    correction_host_attention: float = 1.0  # of the host's attention
    totals: StepTotals | None = None
