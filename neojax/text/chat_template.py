"""Renders chats with a model's own Jinja template, which is untrusted code: it runs sandboxed."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Noncharacters of Unicode, which no text holds.
_MARK = "\ufdd0\ufdd1"


class TemplateError(ValueError):
    """The template is broken, or refuses these messages."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    bos_token: str = "",
    eos_token: str = "",
    **kwargs: Any,
) -> str:
    """The prompt for a chat, as transformers' apply_chat_template gives it.

    messages: each with a role and a content: a string, a list of text parts, or None.
    continue_final_message: the prompt ends with the last message's text, to be continued.
    kwargs: further variables of the template, such as enable_thinking.
    Raises TemplateError with the template's own words.
    """
    shown = [_with_text(message) for message in messages]
    if continue_final_message:
        if not shown:
            raise TemplateError("there is no message to continue")
        # A mark, not the text: it may occur elsewhere, and templates strip its end.
        shown[-1]["content"] += _MARK
    try:
        text = _compiled(template).render(
            messages=shown,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
            **{"tools": None, "documents": None, **kwargs},
        )
    except TemplateError:
        raise
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template failed: {error}") from error
    except (TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
        # What a template's expressions raise on messages that it was not written for.
        raise TemplateError(f"the chat template cannot render these messages: {error}") from error
    if not continue_final_message:
        return text
    if text.count(_MARK) != 1:
        raise TemplateError("the chat template does not show the last message once: not continued")
    return text.partition(_MARK)[0]


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is a string: text-only templates know nothing else."""
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence):
        raise TemplateError(
            f"content must be text or a list of parts, not {type(content).__name__}"
        )
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise TemplateError(f"content part of type {kind!r} is not supported; supported: text")
        texts.append(part["text"])
    return {**message, "content": " ".join(texts)}


class _GenerationBlock(Extension):
    """{% generation %} marks what a trainer learns from; for serving its body is plain text."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(f"the chat template refuses these messages: {message}")


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
