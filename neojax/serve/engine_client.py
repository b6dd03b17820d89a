"""The link to the engine process: requests out, tokens and statistics in.

Knows nothing of HTTP or text. A `Generation` is a set of engine requests that one HTTP request
waits for; leaving it aborts what has not finished.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from neojax.engine.messages import (
    Abort,
    AddRequest,
    Failed,
    FromEngine,
    Ready,
    Shutdown,
    Stats,
    ToEngine,
    Tokens,
)
from neojax.engine.report import EngineStats, RequestTokens


class NewRequest(NamedTuple):
    """What the engine needs for one choice; params is `dataclasses.asdict(SamplingParams)`."""

    prompt_ids: list[int]
    params: dict[str, object]


class Arrival(NamedTuple):
    """Tokens of one choice and when they came (monotonic seconds)."""

    index: int
    tokens: RequestTokens
    time_s: float


class Generation:
    """The unfinished engine requests of one HTTP request. Use as a context manager."""

    def __init__(self, client: EngineClient, name: str, requests: Sequence[NewRequest]) -> None:
        """name: begins the ids of the engine requests, so that logs of both processes match."""
        self._client = client
        self._name = name
        self._requests = requests
        self._ids: dict[int, str] = {}
        self._mail: deque[Arrival] = deque()
        self._event = asyncio.Event()

    def __enter__(self) -> Generation:
        for index, request in enumerate(self._requests):
            request_id = self._client.unused_id(self._name)
            self._ids[index] = request_id
            self._client.add(request_id, request, self, index)
        return self

    def __exit__(self, *exc: object) -> None:
        for index in list(self._ids):
            self.abort(index)

    async def arrivals(self) -> list[Arrival]:
        """Wait for tokens of any choice; all that came since the last call."""
        while not self._mail:
            self._event.clear()
            await self._event.wait()
        mail = list(self._mail)
        self._mail.clear()
        return mail

    def abort(self, index: int) -> None:
        """Stop one choice; nothing more of it arrives."""
        request_id = self._ids.pop(index, None)
        if request_id is not None:
            self._client.abort(request_id)

    def deliver(self, arrival: Arrival) -> None:
        """Called by the client for each message of the engine."""
        if arrival.tokens.finish_reason is not None:
            self._ids.pop(arrival.index, None)
        self._mail.append(arrival)
        self._event.set()


class EngineClient:
    """Both sockets, and who waits for which request."""

    def __init__(self, endpoint_in: str, endpoint_out: str) -> None:
        context = zmq.Context()
        # Sending never waits: no high-water mark, and the engine is connected once it is ready.
        self._push = context.socket(zmq.PUSH)
        self._push.setsockopt(zmq.LINGER, 0)
        self._push.setsockopt(zmq.SNDHWM, 0)
        self._pull = zmq.asyncio.Context.shadow(context.underlying).socket(zmq.PULL)
        self._pull.setsockopt(zmq.RCVHWM, 0)
        self._push.bind(endpoint_in)
        self._pull.bind(endpoint_out)
        self._context = context
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._numbers = itertools.count()
        self._waiting: dict[str, tuple[Generation, int]] = {}
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.stats: EngineStats | None = None
        self.failure: str | None = None
        self.last_progress_s = time.monotonic()

    @property
    def num_requests(self) -> int:
        """Engine requests that have not finished."""
        return len(self._waiting)

    @property
    def stalled_s(self) -> float:
        """Seconds without a finished step while requests wait; 0 when none does."""
        return time.monotonic() - self.last_progress_s if self._waiting else 0.0

    async def receive(self) -> None:
        """Take messages until cancelled, or until the engine says that it failed."""
        while True:
            message = self._decoder.decode(await self._pull.recv())
            match message:
                case Tokens():
                    self._deliver(message)
                case Stats(stats):
                    if self.stats is None or stats.last_step_unix_s > self.stats.last_step_unix_s:
                        self.last_progress_s = time.monotonic()
                    self.stats = stats
                case Ready():
                    if not self.ready.done():
                        self.ready.set_result(message)
                case Failed():
                    self.fail(f"the engine failed: {message.message}")
                    return

    def generate(self, name: str, requests: Sequence[NewRequest]) -> Generation:
        """Requests to the engine, sent on entering the returned context."""
        return Generation(self, name, requests)

    def unused_id(self, name: str) -> str:
        """An id that begins with `name`, which itself may have been used before."""
        return f"{name}-{next(self._numbers)}"

    def add(self, request_id: str, request: NewRequest, owner: Generation, index: int) -> None:
        """Send one request; its tokens go to `owner`."""
        if not self._waiting:
            self.last_progress_s = time.monotonic()
        self._waiting[request_id] = (owner, index)
        if self.failure is None:
            self._send(AddRequest(request_id, request.prompt_ids, request.params))
        if self.failure is not None:
            self._end(request_id, "error", self.failure)

    def abort(self, request_id: str) -> None:
        """Forget a request, here and in the engine."""
        if self._waiting.pop(request_id, None) is not None and self.failure is None:
            self._send(Abort(request_id))

    def abort_all(self, reason: str) -> None:
        """End every request with finish_reason abort."""
        for request_id in list(self._waiting):
            if self.failure is None:
                self._send(Abort(request_id))
            self._end(request_id, "abort", reason)

    def fail(self, message: str) -> None:
        """The engine is gone: every request, now and later, ends with an error."""
        if self.failure is None:
            self.failure = message
        for request_id in list(self._waiting):
            self._end(request_id, "error", self.failure)

    def shut_down(self) -> None:
        """Ask the engine to end after its step in flight."""
        if self.failure is None and self.ready.done():
            self._send(Shutdown())

    def close(self) -> None:
        """Close both sockets."""
        self._push.close()
        self._pull.close()
        self._context.term()

    def _send(self, message: ToEngine) -> None:
        try:
            self._push.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # no peer: it was connected, so it has gone
            self.fail("the engine is not connected")

    def _deliver(self, step: Tokens) -> None:
        now = self.last_progress_s = time.monotonic()
        for tokens in step.outputs:
            # Tokens of an aborted request may still be on their way.
            owner, index = self._waiting.get(tokens.request_id, (None, 0))
            if owner is None:
                continue
            if tokens.finish_reason is not None:
                del self._waiting[tokens.request_id]
            owner.deliver(Arrival(index, tokens, now))

    def _end(self, request_id: str, finish_reason: str, message: str) -> None:
        owner, index = self._waiting.pop(request_id, (None, 0))
        if owner is None:
            return
        tokens = RequestTokens(request_id, [], finish_reason=finish_reason, message=message)
        owner.deliver(Arrival(index, tokens, time.monotonic()))
