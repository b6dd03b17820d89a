"""Reading a request body: bounded in size and time, JSON, and valid."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from neojax.serve.errors import ApiError
from neojax.serve.protocol import Body, parse

MAX_BODY_BYTES = 16 * 2**20
BODY_TIMEOUT_S = 60.0


async def read_body(request: Request, schema: type[Body]) -> Body:
    """The body as `schema`. Raises ApiError: 413 too large, 408 too slow, 400 otherwise."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(400, f"Content-Type must be application/json, got {kind[:100] or 'none'!r}")
    too_large = ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise too_large
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                raw += piece
                if len(raw) > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        message = f"the body did not come within {BODY_TIMEOUT_S:.0f} s"
        raise ApiError(408, message) from None
    return parse(schema, bytes(raw))
