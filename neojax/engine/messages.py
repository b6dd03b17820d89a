"""What crosses the link between the HTTP process and the engine process: token ids in and out.

Encoded with msgspec (msgpack). Neither side sends text: tokenising is the HTTP process's work.
"""

from __future__ import annotations

import msgspec


class AddRequest(msgspec.Struct, tag=True, frozen=True):
    """Generate for this prompt. Answered by `Tokens` until one carries a finish_reason."""

    request_id: str
    prompt_ids: list[int]
    params: dict  # dataclasses.asdict(SamplingParams)


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Forget a request: its blocks are freed. Unknown ids are ignored."""

    request_id: str


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """End the engine process after the step in flight."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Sent once, when everything is compiled: the numbers a server shows."""

    max_model_len: int
    vocab_size: int
    device: str
    num_device_blocks: int
    num_host_blocks: int
    block_size: int
    startup_s: float


class RequestTokens(msgspec.Struct, frozen=True):
    """New tokens of one request.

    finish_reason: None while it runs, then stop, length, abort, error, or rejected when the
    request could never run. stop_reason: the stop token's id, or None for EOS. message: the
    error's text when finish_reason is error or rejected.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    placement: str = "device"
    message: str | None = None


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """What one step gave."""

    outputs: list[RequestTokens]


class Stats(msgspec.Struct, tag=True, frozen=True):
    """A snapshot of the engine, sent at most every 100 ms while it runs and each second idle.

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
    num_compiles_after_ready: int
    requests_placed_device: int
    requests_placed_host: int
    last_step_unix_s: float


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot go on; it exits with a non-zero code after sending this."""

    message: str


ToEngine = AddRequest | Abort | Shutdown
FromEngine = Ready | Tokens | Stats | Failed
