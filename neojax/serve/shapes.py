"""How a generation looks to a client: as chat or as completion, whole or streamed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import ClassVar, Protocol

from msgspec import UNSET, Struct, UnsetType

from neojax.logprobs import TokenLogprobs
from neojax.serve.generation import TextDelta
from neojax.serve.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    ChatTopLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    Usage,
)
from neojax.serve.text_model import TextModel
from neojax.text.token_bytes import shown


class Shape(Protocol):
    """One request's answer. `whole` takes, per choice, the joined text and how it ended."""

    def whole(self, ended: Sequence[TextDelta], usage: Usage) -> Struct: ...
    def opening(self, index: int) -> Struct | None: ...
    def chunk(self, delta: TextDelta, usage: Usage | None) -> Struct: ...
    def usage_chunk(self, usage: Usage) -> Struct: ...


class _OneAnswer:
    """What every object of one answer repeats."""

    PREFIX: ClassVar[str]  # of its id

    def __init__(
        self,
        request_id: str,
        model: str,
        text_model: TextModel,
        *,
        include_usage: bool,
        prompt_logprobs: int | None,
    ) -> None:
        self._id = self.PREFIX + request_id
        self._created = int(time.time())
        self._model = model
        self._text_model = text_model
        self._prompt_logprobs = prompt_logprobs
        # With include_usage every chunk carries usage, null but in the last.
        self._no_usage = None if include_usage else UNSET


class ChatShape(_OneAnswer):
    """Objects chat.completion and chat.completion.chunk."""

    PREFIX = "chatcmpl-"

    def whole(self, ended: Sequence[TextDelta], usage: Usage) -> ChatCompletion:
        """The answer when it is not streamed."""
        choices = [
            ChatChoice(
                end.index,
                ChatMessage(end.text),
                end.finish_reason or "",
                end.stop_reason,
                _chat_logprobs(end),
            )
            for end in ended
        ]
        prompt = _prompt_logprobs(ended[0], self._prompt_logprobs, self._text_model)
        return ChatCompletion(self._id, self._created, self._model, choices, usage, prompt)

    def opening(self, index: int) -> ChatChunk:
        """The first chunk of a choice: the role."""
        return self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))

    def chunk(self, delta: TextDelta, usage: Usage | None) -> ChatChunk:
        """New text; with the finish_reason if it is the choice's last, and usage if given."""
        choice = ChatChunkChoice(delta.index, ChatDelta(content=delta.text))
        choice.logprobs = _chat_logprobs(delta)
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
        return self._chunk(choice, usage)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """The last chunk when usage was asked for."""
        return ChatChunk(self._id, self._created, self._model, [], usage)

    def _chunk(self, choice: ChatChunkChoice, usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, [choice], usage or self._no_usage)


class CompletionShape(_OneAnswer):
    """Object text_completion, whole and as chunks."""

    PREFIX = "cmpl-"

    def whole(self, ended: Sequence[TextDelta], usage: Usage) -> Completion:
        """The answer when it is not streamed."""
        choices = [self._choice(end) for end in ended]
        return Completion(self._id, self._created, self._model, choices, usage)

    def opening(self, index: int) -> None:
        """Completions have no chunk before the text."""
        return None

    def chunk(self, delta: TextDelta, usage: Usage | None) -> Completion:
        """New text; with the finish_reason if it is the choice's last, and usage if given."""
        choices = [self._choice(delta)]
        return Completion(self._id, self._created, self._model, choices, usage or self._no_usage)

    def usage_chunk(self, usage: Usage) -> Completion:
        """The last chunk when usage was asked for."""
        return Completion(self._id, self._created, self._model, [], usage)

    def _choice(self, delta: TextDelta) -> CompletionChoice:
        return CompletionChoice(
            delta.index,
            delta.text,
            delta.finish_reason,
            delta.stop_reason,
            _completion_logprobs(delta),
            _prompt_logprobs(delta, self._prompt_logprobs, self._text_model),
        )


def _completion_logprobs(delta: TextDelta) -> CompletionLogprobs | None:
    if not delta.tokens:
        return None
    found = CompletionLogprobs()
    for token in delta.tokens:
        found.tokens.append(token.token)
        found.token_logprobs.append(token.logprob)
        found.text_offset.append(token.offset)
        if token.logprob is None:
            found.top_logprobs.append(None)
            continue
        # The token itself is always there, as OpenAI has it.
        top = {other.token: other.logprob for other in reversed(token.top)}
        found.top_logprobs.append({token.token: token.logprob} | dict(reversed(top.items())))
    return found


def _chat_logprobs(delta: TextDelta) -> ChatLogprobs | None:
    if not delta.tokens:
        return None
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                token.token,
                token.logprob,
                list(token.data),
                [ChatTopLogprob(top.token, top.logprob, list(top.data)) for top in token.top],
            )
            for token in delta.tokens
            if token.logprob is not None
        ]
    )


def _prompt_logprobs(
    delta: TextDelta, number: int | None, text_model: TextModel
) -> PromptLogprobs | UnsetType:
    if number is None or delta.prompt_logprobs is None:
        return UNSET
    return [
        None if scores is None else _place(scores, number, text_model)
        for scores in delta.prompt_logprobs
    ]


def _place(scores: TokenLogprobs, number: int, text_model: TextModel) -> dict[str, PromptLogprob]:
    ranked = [(scores.token_id, scores.logprob, scores.rank)]
    ranked += zip(scores.top_ids[:number], scores.top_logprobs, itertools.count(1), strict=False)
    return {
        str(token_id): PromptLogprob(logprob, rank, shown(text_model.token_bytes(token_id)))
        for token_id, logprob, rank in ranked
    }
