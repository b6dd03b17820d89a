"""What clients may send: strict schemas of OpenAI's requests with vLLM's extensions.

Fields that are known but not served yet are refused unless neutral; unknown ones are ignored with
a debug line, as vLLM does.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from neojax.sampling_params import (
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    Placement,
    SamplingParams,
)
from neojax.serve.conversation import ROLES, Messages, Schema
from neojax.serve.errors import ApiError
from neojax.serve.request_fields import (
    CompletionLogprobs,
    LogitBias,
    Prompt,
    RequestId,
    ResponseFormat,
    Stop,
)
from neojax.serve.sampling_defaults import SamplingDefaults

log = logging.getLogger("neojax.serve")

MAX_CHOICES = 128

# Name of a field we cannot honour yet -> the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "return_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


class _Request(BaseModel):
    """A request body: unknown fields are kept only to be judged."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = cast(dict[str, object], body)
        return {name: value for name, value in fields.items() if value is not None}

    @model_validator(mode="after")
    def _judge_extra_fields(self) -> _Request:
        for name, value in (self.model_extra or {}).items():
            if name not in UNSUPPORTED:
                log.debug("ignored the unknown request field %r", name[:100])
            elif not any(_same(value, neutral) for neutral in UNSUPPORTED[name]):
                raise ApiError(400, f"{name} is not supported by this server yet", param=name)
        return self


def _same(value: object, neutral: object) -> bool:
    # logprobs: 0 asks for something, logprobs: false does not.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


MaxTokens = Annotated[int, Field(ge=1, lt=2**63)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Schema):
    """What a stream carries beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Generate(_Request):
    """The fields that completions and chat share. None means the default."""

    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**63)] = 0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: LogitBias = {}
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop = []
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    kv_placement: Placement = "auto"
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    request_id: RequestId | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> _Generate:
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options is only allowed with stream: true", param="stream_options"
            )
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_come_whole(self) -> _Generate:
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(
                400,
                "prompt_logprobs is not available with stream: true; use echo with logprobs",
                param="prompt_logprobs",
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell of at each place; None: no log probabilities."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream tells the tokens so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling_params(self, max_tokens: int, defaults: SamplingDefaults) -> SamplingParams:
        """The parameters of one choice; max_tokens is already fitted to the context.

        Raises ValueError for parameters that exclude each other.
        """
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})"
            )
        prompt_logprobs = self.prompt_logprobs
        if self.echoes and self.num_logprobs is not None:
            prompt_logprobs = max(prompt_logprobs or 0, self.num_logprobs)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=(
                defaults.repetition_penalty
                if self.repetition_penalty is None
                else self.repetition_penalty
            ),
            logit_bias=self.logit_bias,
            logprobs=self.num_logprobs,
            prompt_logprobs=prompt_logprobs,
            json_schema=None if self.response_format is None else self.response_format.grammar,
            priority=self.priority,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            kv_placement=self.kv_placement,
        )


class CompletionRequest(_Generate):
    """Body of POST /v1/completions."""

    DEFAULT_MAX_TOKENS: ClassVar[int] = 16

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: CompletionLogprobs = None

    @model_validator(mode="after")
    def _no_tokens_need_a_reason(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ApiError(
                400,
                "max_tokens: 0 gives nothing but with echo or prompt_logprobs; "
                "without them it must be at least 1",
                param="max_tokens",
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        """As many as `logprobs` says."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """As `echo` says."""
        return self.echo

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        prompt = cast(str | list[int] | list[str | list[int]], self.prompt)
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [cast(str | list[int], prompt)]
        return cast(list[str | list[int]], prompt)


class _Rendering(_Request):
    """How a conversation becomes a prompt.

    add_generation_prompt is on unless the last message is to be continued.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_way_to_go_on(self) -> _Rendering:
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        return self

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the prompt ends with the beginning of the assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


class ChatRequest(_Rendering, _Generate):
    """Body of POST /v1/chat/completions. max_completion_tokens wins over max_tokens."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """As many as `top_logprobs` says, if `logprobs` does."""
        return self.top_logprobs if self.logprobs else None


class TokenizeRequest(_Rendering):
    """Body of POST /tokenize: a text or a conversation.

    add_special_tokens defaults to true for a text; a template writes its special tokens itself.
    """

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(_Request):
    """Body of POST /detokenize."""

    tokens: list[int]


Body = TypeVar("Body", bound=BaseModel)


def parse(schema: type[Body], raw: bytes) -> Body:
    """A request body as `schema`. Raises ApiError 400 with the path of the fault."""
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "json_invalid":
        raise ApiError(400, f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}")
    path = _path(fault["loc"])
    if fault["type"].startswith("union_tag"):
        path, message = path + ".role", f"must be one of {', '.join(ROLES)}"
    where = f"{path}: " if path else ""
    raise ApiError(400, where + message, param=path or None)


def _path(location: tuple[int | str, ...]) -> str:
    """messages[0].content for ("messages", 0, "user", "content", "str")."""
    path = ""
    for before, part in zip((None, *location), location, strict=False):
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (isinstance(before, int) and part in ROLES) and part.isidentifier():
            path += f".{part}" if path else part
    return path
