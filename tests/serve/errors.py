"""What every refusal of the server looks like."""

from __future__ import annotations

import json
from typing import Any

import httpx


def expect_error(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a reply, checked for OpenAI's shape."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error = json.loads(reply.content.decode("utf-8"))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["message"]
    return error
