"""Text in and out of one checkpoint: tokenizer, chat template and the detokenizer of a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neojax.config import ServeConfig
from neojax.hub import resolve_checkpoint
from neojax.sampling_params import SamplingParams
from neojax.serve.errors import ApiError
from neojax.serve.sampling_defaults import SamplingDefaults
from neojax.text.chat_template import render_chat
from neojax.text.detokenizer import Detokenizer
from neojax.text.tokenizer import Tokenizer

# Above this many characters a text is encoded in a thread, so that streams keep flowing.
_LONG_TEXT = 4096
# Variables of a template that are not the client's to set.
_RESERVED = frozenset(
    {
        *("messages", "template", "bos_token", "eos_token"),
        *("add_generation_prompt", "continue_final_message"),
    }
)


class TextModel:
    """A checkpoint as the HTTP process sees it. Faults of a client's text are ApiErrors."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        checkpoint: Path,
        *,
        chat_template: str | None = None,
        defaults: SamplingDefaults | None = None,
        trust_request_template: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.checkpoint = checkpoint
        self.chat_template = chat_template or tokenizer.chat_template
        self.defaults = defaults or SamplingDefaults()
        self.token_bytes = tokenizer.token_bytes
        self._trust_request_template = trust_request_template

    @classmethod
    def load(cls, config: ServeConfig) -> TextModel:
        """Fetch the checkpoint if need be and read its tokenizer; blocks.

        Raises OSError or ValueError saying what is missing or wrong.
        """
        checkpoint = resolve_checkpoint(config.model)
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        template = None
        if config.chat_template is not None:
            template = Path(config.chat_template).read_text(encoding="utf-8")
            # A mistake in the file must end the start, not the first request.
            render_chat(template, [{"role": "user", "content": "test"}])
        defaults = SamplingDefaults()
        if config.generation_config == "auto":
            defaults = SamplingDefaults.of_checkpoint(checkpoint)
        return cls(
            tokenizer,
            checkpoint,
            chat_template=template,
            defaults=defaults,
            trust_request_template=config.trust_request_chat_template,
        )

    async def encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text."""
        try:
            if len(text) > _LONG_TEXT:
                return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)
            return self.tokenizer.encode(text, add_special_tokens)
        except ValueError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        template: str | None = None,
        kwargs: Mapping[str, Any],
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a conversation. The template writes the special tokens itself.

        template: the client's own. It is a program: the sandbox keeps it from the machine, but
        not from running for ever, so the operator must have said that clients are trusted.
        """
        if template is not None and not self._trust_request_template:
            raise ApiError(
                400,
                "chat_template in a request needs a server started with "
                "--trust-request-chat-template",
                param="chat_template",
            )
        template = template or self.chat_template
        if not template:
            raise ApiError(
                400,
                "this model has no chat template: use /v1/completions, or serve an instruct model",
                param="messages",
            )
        if _RESERVED & kwargs.keys():
            names = ", ".join(sorted(_RESERVED & kwargs.keys()))
            raise ApiError(
                400,
                f"chat_template_kwargs may not set {names}",
                param="chat_template_kwargs",
            )
        try:
            text = render_chat(
                template,
                [_for_template(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                bos_token=self.tokenizer.bos_token,
                eos_token=self.tokenizer.eos_token,
                **kwargs,
            )
        except (ValueError, TypeError) as error:
            raise ApiError(400, f"chat template: {error}", param="messages") from None
        return await self.encode(text, add_special_tokens=add_special_tokens, param="messages")

    def detokenizer(self, params: SamplingParams, prompt_ids: Sequence[int]) -> Detokenizer:
        """A fresh detokenizer for one choice; its text continues the prompt's."""
        return Detokenizer(self.tokenizer, params, prompt_ids)


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Tool calls carry their arguments as objects: templates print them with tojson."""
    shown = {name: value for name, value in message.items() if value is not None}
    shown.setdefault("content", "")
    if "tool_calls" in shown:
        shown["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.loads(call["function"]["arguments"]),
                },
            }
            for call in shown["tool_calls"]
        ]
    return shown
