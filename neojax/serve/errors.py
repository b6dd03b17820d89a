"""Every error a client can get: OpenAI's shape, and the handlers that give it."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class ApiError(Exception):
    """An error to show to the client, with the HTTP status it deserves.

    param names the field at fault; retry_after_s becomes the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The JSON text; always valid UTF-8, whatever the client sent."""
        message = self.message.encode("utf-8", "replace").decode()
        param = None if self.param is None else self.param.encode("utf-8", "replace").decode()
        kind = _TYPES.get(self.status)
        if kind is None:
            kind = (
                HTTPStatus(self.status).phrase.title().replace(" ", "").replace("-", "") + "Error"
            )
        return msgspec.json.encode(
            {"error": {"message": message, "type": kind, "param": param, "code": self.status}}
        )

    def response(self) -> Response:
        """The whole HTTP answer."""
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.body(), self.status, headers, media_type="application/json")


def install(app: FastAPI) -> None:
    """Make the errors that routes and routing raise ApiErrors' answers."""

    async def api_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{error.detail}: {request.method} {request.url.path[:200]}"
        response = ApiError(error.status_code, message).response()
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
