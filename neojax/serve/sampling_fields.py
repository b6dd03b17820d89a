"""Request fields that need more than a range: logit_bias, response_format, logprobs."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, WithJsonSchema

from neojax.sampling_params import MAX_LOGIT_BIASES
from neojax.serve.conversation import Schema

MAX_COMPLETION_LOGPROBS = 5  # OpenAI's limit for this API


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
