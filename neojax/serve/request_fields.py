"""Request fields that need more than a range: prompt, stop, logit_bias, response_format, ids."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, WithJsonSchema

from neojax.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_STRINGS
from neojax.serve.conversation import Schema

MAX_COMPLETION_LOGPROBS = 5  # OpenAI's limit for this API
MAX_STOP_LENGTH = 1024
_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def is_request_id(text: str) -> bool:
    """Whether a client's id for a request is short and plain enough to be logged and returned."""
    return _REQUEST_ID.fullmatch(text) is not None


def _check_request_id(value: Any) -> Any:
    if isinstance(value, str) and not is_request_id(value):
        raise ValueError("an id has 1 to 128 letters, digits and characters of _ . : / + = @ -")
    return value


RequestId = Annotated[str, BeforeValidator(_check_request_id)]


def _check_prompt(value: Any) -> Any:
    """Accept str, list[str], list[int] and list[list[int]] with one clear message for the rest."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        items = cast(list[object], value)
        if all(isinstance(item, str) for item in items) or _are_ids(items):
            return items
        if all(isinstance(item, list) and _are_ids(cast(list[object], item)) for item in items):
            return items
    raise ValueError(
        "a prompt is a string, a non-empty list of strings, a non-empty list of token ids, "
        "or a list of such lists"
    )


def _are_ids(items: list[object]) -> bool:
    return all(type(item) is int for item in items)  # bool is a subclass of int


Prompt = Annotated[
    Any,  # str | list[str] | list[int] | list[list[int]]; a union would report every member
    BeforeValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                {"type": "array", "minItems": 1, "items": {"type": "integer"}},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "array", "items": {"type": "integer"}},
                },
            ]
        }
    ),
]


def _check_stop(value: Any) -> Any:
    stops = cast(list[object], value) if isinstance(value, list) else [value]
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(stops)}")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise ValueError(
                f"a stop string has 1 to {MAX_STOP_LENGTH} characters; stop is one or a list of "
                f"up to {MAX_STOP_STRINGS}"
            )
    return stops


Stop = Annotated[
    list[str],
    BeforeValidator(_check_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOP_STRINGS},
            ]
        }
    ),
]


def _check_logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("logit_bias is an object of token ids and numbers")
    biases = cast(dict[object, object], value)
    if len(biases) > MAX_LOGIT_BIASES:
        raise ValueError(f"at most {MAX_LOGIT_BIASES} tokens, got {len(biases)}")
    found: dict[int, float] = {}
    for token, bias in biases.items():
        if not (isinstance(token, str) and token.isascii() and token.isdecimal()):
            raise ValueError(f"{str(token)[:40]!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {token[:40]} must be a number from -100 to 100")
        found[int(token[:20])] = float(bias)
    return found


LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_check_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIASES,
        }
    ),
]


def _false_is_absent(value: Any) -> Any:
    return None if value is False else value


CompletionLogprobs = Annotated[
    Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None,
    BeforeValidator(_false_is_absent),
]


class JsonSchema(Schema):
    """A schema that the answer follows; strict or not, every token of it is held to it."""

    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Schema):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def grammar(self) -> str | None:
        """The JSON schema as text, or None for free text. Raises ValueError when it is missing."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return '{"type": "object"}'
        if self.json_schema is None:
            raise ValueError("type json_schema needs json_schema with a schema")
        return json.dumps(self.json_schema.schema_)
