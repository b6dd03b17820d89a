"""What clients get: OpenAI's response objects, encoded with msgspec."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class Usage(Struct):
    """Tokens of a request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class PromptLogprob(Struct):
    """A token at one place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By place, then by token id; None for the first token."""


class CompletionLogprobs(Struct):
    """By place in the text; top_logprobs by token."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(Struct):
    """One text, or a piece of it in a stream."""

    index: int
    text: str
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """Answer of /v1/completions, whole or a chunk."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class ChatTopLogprob(Struct):
    """A token that might have stood at some place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    """A token of the message."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct):
    """Of every token of the message, or of a chunk."""

    content: list[ChatTokenLogprob]
    refusal: None = None


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
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Struct):
    """Whole answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
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
    logprobs: ChatLogprobs | None = None


class ChatChunk(Struct):
    """One event of a chat stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
