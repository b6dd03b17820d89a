"""What the messages of a conversation may hold: text, and the history of tool calls."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)


class Schema(BaseModel):
    """Part of a request body: of the right types, whatever else it holds."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def _check_content(value: Any) -> Any:
    """Accept a text or a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("content is a string or a list of text parts")
    for number, item in enumerate(cast(list[object], value)):
        part = cast(dict[str, object], item) if isinstance(item, dict) else {}
        kind = part.get("type")
        if kind == "text" and isinstance(part.get("text"), str):
            continue
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"part {number} is {kind[:40]!r}: only text parts are supported")
        raise ValueError(f'part {number} must be {{"type": "text", "text": "..."}}')
    return cast(list[object], value)


Content = Annotated[
    Any,  # str | list of {"type": "text", "text": str}
    BeforeValidator(_check_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {
                            "type": {"type": "string", "const": "text"},
                            "text": {"type": "string"},
                        },
                    },
                },
            ]
        }
    ),
]


class FunctionCall(Schema):
    """A tool call in the history of a conversation; arguments is JSON text."""

    name: str
    arguments: str

    @model_validator(mode="after")
    def _arguments_are_json(self) -> FunctionCall:
        try:
            json.loads(self.arguments)
        except ValueError as error:
            raise ValueError(f"arguments must be JSON text: {error}") from None
        return self


class ToolCall(Schema):
    """One call that an assistant made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class InputMessage(Schema):
    """From the system, the developer or the user."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class AssistantMessage(Schema):
    """What the model said earlier."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("an assistant message needs content or tool_calls")
        return self


class ToolMessage(Schema):
    """What a tool answered earlier."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None


ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Annotated[InputMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(min_length=1)]
