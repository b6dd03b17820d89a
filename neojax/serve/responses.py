"""What clients get: OpenAI's response objects, encoded with msgspec."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class Usage(Struct):
    """Tokens of a request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(Struct):
    """One text, or a piece of it in a stream."""

    index: int
    text: str
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: None = None


class Completion(Struct):
    """Answer of /v1/completions, whole or a chunk."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class ChatMessage(Struct):
    """The assistant's message."""

    content: str
    role: str = "assistant"


class ChatChoice(Struct):
    """One whole message."""

    index: int
    message: ChatMessage
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: None = None


class ChatCompletion(Struct):
    """Whole answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class ChatDelta(Struct):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: None = None


class ChatChunk(Struct):
    """One event of a chat stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
