"""The HTTP response of a generation: one JSON body or a stream of events.

The work runs inside the response so that one place races it with the client's disconnect, and so
that an error before the first token is still a real HTTP error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from neojax.serve.errors import ApiError
from neojax.serve.generation import TextDelta, TextGeneration
from neojax.serve.responses import Usage
from neojax.serve.shapes import Shape

_encode = msgspec.json.Encoder().encode
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """Runs a generation and sends it; a client that goes away ends it."""

    def __init__(
        self,
        generation: TextGeneration,
        shape: Shape,
        *,
        num_choices: int,
        num_prompt_tokens: int,
        stream: bool,
        include_usage: bool,
        continuous_usage: bool,
        deadline_s: float | None,
    ) -> None:
        super().__init__()
        self._generation = generation
        self._shape = shape
        self._num_choices = num_choices
        self._num_prompt_tokens = num_prompt_tokens
        self._stream = stream
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._deadline_s = deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; called by the framework."""
        work = self._send_stream if self._stream else self._send_whole
        try:
            await until_disconnect(receive, work(scope, receive, send))
        finally:
            usage = self._usage()
            scope["state"]["access"] |= {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
            }

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._generation as generation:
                parts: list[list[TextDelta]] = [[] for _ in range(self._num_choices)]
                while not generation.is_finished:
                    for delta in await self._deltas():
                        parts[delta.index].append(delta)
                ended = [_joined(deltas) for deltas in parts]
                body = _encode(self._shape.whole(ended, self._usage()))
            response = Response(body, media_type="application/json")
        except ApiError as error:
            response = error.response()
        await response(scope, receive, send)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._generation:
                # Headers wait for the first tokens: until then an error can be a real 4xx or 5xx.
                deltas = await self._deltas()
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
                await self._send_chunks(deltas, send)
        except ApiError as error:
            await error.response()(scope, receive, send)

    async def _send_chunks(self, deltas: list[TextDelta], send: Send) -> None:
        """The body of a stream that begins with these deltas."""
        events: list[bytes] = []
        for index in range(self._num_choices):
            opening = self._shape.opening(index)
            if opening is not None:
                events.append(_event(opening))
        try:
            while True:
                for delta in deltas:
                    if delta.text or delta.tokens or delta.finish_reason is not None:
                        usage = self._usage() if self._continuous_usage else None
                        events.append(_event(self._shape.chunk(delta, usage)))
                await _send_events(send, events)
                if self._generation.is_finished:
                    break
                deltas = await self._deltas()
            if self._include_usage:
                events.append(_event(self._shape.usage_chunk(self._usage())))
        except ApiError as error:
            events.append(b"data: " + error.body() + b"\n\n")
        events.append(b"data: [DONE]\n\n")
        await _send_events(send, events, is_last=True)

    async def _deltas(self) -> list[TextDelta]:
        if self._deadline_s is None:
            return await self._generation.deltas()
        try:
            left_s = self._deadline_s - time.monotonic()
            async with asyncio.timeout(max(0.0, left_s)):
                return await self._generation.deltas()
        except TimeoutError:
            message = "the request took longer than this server allows (--request-timeout)"
            raise ApiError(504, message) from None

    def _usage(self) -> Usage:
        generated = self._generation.num_completion_tokens
        return Usage(self._num_prompt_tokens, generated, self._num_prompt_tokens + generated)


def _joined(deltas: list[TextDelta]) -> TextDelta:
    """A choice's whole answer."""
    return deltas[-1]._replace(
        text="".join(delta.text for delta in deltas),
        tokens=[token for delta in deltas for token in delta.tokens],
        prompt_logprobs=deltas[0].prompt_logprobs,
    )


async def until_disconnect(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Run `work`; cancel it as soon as the client has gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait({task, gone})
    if not task.cancelled():
        task.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_events(send: Send, events: list[bytes], *, is_last: bool = False) -> None:
    if events or is_last:
        body = b"".join(events)
        events.clear()
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _event(message: msgspec.Struct) -> bytes:
    return b"data: " + _encode(message) + b"\n\n"
