"""How a generation looks to a client: as chat or as completion, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET, Struct

from neojax.serve.generation import TextDelta
from neojax.serve.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    Completion,
    CompletionChoice,
    Usage,
)


class Shape(Protocol):
    """One request's answer. `whole` takes, per choice, the joined text and how it ended."""

    def whole(self, ended: Sequence[TextDelta], usage: Usage) -> Struct: ...
    def opening(self, index: int) -> Struct | None: ...
    def chunk(self, delta: TextDelta, usage: Usage | None) -> Struct: ...
    def usage_chunk(self, usage: Usage) -> Struct: ...


class ChatShape:
    """Objects chat.completion and chat.completion.chunk."""

    def __init__(self, request_id: str, model: str, include_usage: bool) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        # With include_usage every chunk carries usage, null but in the last.
        self._no_usage = None if include_usage else UNSET

    def whole(self, ended: Sequence[TextDelta], usage: Usage) -> ChatCompletion:
        """The answer when it is not streamed."""
        choices = [
            ChatChoice(end.index, ChatMessage(end.text), end.finish_reason or "", end.stop_reason)
            for end in ended
        ]
        return ChatCompletion(self._id, self._created, self._model, choices, usage)

    def opening(self, index: int) -> ChatChunk:
        """The first chunk of a choice: the role."""
        return self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))

    def chunk(self, delta: TextDelta, usage: Usage | None) -> ChatChunk:
        """New text; with the finish_reason if it is the choice's last, and usage if given."""
        choice = ChatChunkChoice(delta.index, ChatDelta(content=delta.text))
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
        return self._chunk(choice, usage)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """The last chunk when usage was asked for."""
        return ChatChunk(self._id, self._created, self._model, [], usage)

    def _chunk(self, choice: ChatChunkChoice, usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, [choice], usage or self._no_usage)


class CompletionShape:
    """Object text_completion, whole and as chunks."""

    def __init__(self, request_id: str, model: str, include_usage: bool) -> None:
        self._id = f"cmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._no_usage = None if include_usage else UNSET

    def whole(self, ended: Sequence[TextDelta], usage: Usage) -> Completion:
        """The answer when it is not streamed."""
        choices = [_completion_choice(end) for end in ended]
        return Completion(self._id, self._created, self._model, choices, usage)

    def opening(self, index: int) -> None:
        """Completions have no chunk before the text."""
        return None

    def chunk(self, delta: TextDelta, usage: Usage | None) -> Completion:
        """New text; with the finish_reason if it is the choice's last, and usage if given."""
        choices = [_completion_choice(delta)]
        return Completion(self._id, self._created, self._model, choices, usage or self._no_usage)

    def usage_chunk(self, usage: Usage) -> Completion:
        """The last chunk when usage was asked for."""
        return Completion(self._id, self._created, self._model, [], usage)


def _completion_choice(delta: TextDelta) -> CompletionChoice:
    return CompletionChoice(delta.index, delta.text, delta.finish_reason, delta.stop_reason)
