"""What every request passes first and last: request id, API key, access log, our own faults."""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neojax.serve.errors import ApiError
from neojax.serve.request_fields import is_request_id

log = logging.getLogger("neojax.access")
error_log = logging.getLogger("neojax.serve")

# Probes must work without a key.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
# Asked every few seconds by machines: logged at debug.
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})


class Gate:
    """ASGI application around another.

    What routes need of it is in the request's state: `request_id`, which a body may replace, and
    `access`, a mapping of what else belongs into the access log.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._authorizations = [f"Bearer {key}".encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event of the server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = time.monotonic()
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id if is_request_id(request_id) else uuid.uuid4().hex
        state["access"] = {}
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            await send(message)

        try:
            if self._may_enter(scope["path"], headers):
                await self._app(scope, receive, send_with_id)
            else:
                refusal = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY")
                await refusal.response()(scope, receive, send_with_id)
        except ClientDisconnect:
            pass
        except Exception:  # the last place where a fault of ours can become an answer
            error_log.exception("%s %s failed", scope["method"], scope["path"][:200])
            if status is None:
                answer = ApiError(500, "internal error; the server's log has the details")
                await answer.response()(scope, receive, send_with_id)
        finally:
            log.log(
                logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO,
                "%s %s status=%s seconds=%.3f request_id=%s%s",
                scope["method"],
                scope["path"][:200].encode("unicode_escape").decode(),
                status or "disconnected",
                time.monotonic() - start_s,
                state["request_id"],
                "".join(f" {name}={value}" for name, value in state["access"].items()),
            )

    def _may_enter(self, path: str, headers: Headers) -> bool:
        if not self._authorizations or path in OPEN_PATHS:
            return True
        given = headers.get("authorization", "").encode("latin-1", "replace")
        # All are compared, so that the time does not tell which one is near.
        return any([hmac.compare_digest(given, known) for known in self._authorizations])
