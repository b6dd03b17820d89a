"""What crosses the link between the HTTP process and the engine process: token ids in and out.

Encoded with msgspec (msgpack). Neither side sends text: tokenising is the HTTP process's work.
"""

from __future__ import annotations

import msgspec

from neojax.engine.report import EngineStats, RequestTokens


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


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """What one step gave."""

    outputs: list[RequestTokens]


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Sent at most every 100 ms while the engine runs, and each second when it is idle."""

    snapshot: EngineStats


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot go on; it exits with a non-zero code after sending this."""

    message: str


ToEngine = AddRequest | Abort | Shutdown
FromEngine = Ready | Tokens | Stats | Failed
