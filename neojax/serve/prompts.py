"""From a request's prompt to token ids that fit the model, and how many may follow."""

from __future__ import annotations

from neojax.engine.messages import Ready
from neojax.serve.errors import ApiError
from neojax.serve.protocol import ChatRequest, CompletionRequest, Messages, TokenizeRequest
from neojax.serve.text_model import TextModel


async def completion_prompts(
    body: CompletionRequest, text_model: TextModel, ready: Ready
) -> list[list[int]]:
    """Token ids of each prompt of a completions request."""
    prompts: list[list[int]] = []
    for item in body.prompts:
        if isinstance(item, str):
            ids = await text_model.encode(
                item, add_special_tokens=body.add_special_tokens, param="prompt"
            )
        else:
            ids = item
        _check_length(ids, ready, param="prompt")
        prompts.append(check_ids(ids, ready.vocab_size, param="prompt"))
    return prompts


async def chat_prompts(body: ChatRequest, text_model: TextModel, ready: Ready) -> list[list[int]]:
    """Token ids of a chat request, as a list of one prompt."""
    ids = await _render(body, body.messages, text_model)
    return [_check_length(ids, ready, param="messages")]


async def tokenize_prompt(body: TokenizeRequest, text_model: TextModel) -> list[int]:
    """Token ids of a text or a conversation, of any length."""
    if body.messages is not None:
        return await _render(
            body, body.messages, text_model, add_special_tokens=body.add_special_tokens is True
        )
    assert body.prompt is not None  # the schema asks for one of both
    return await text_model.encode(
        body.prompt, add_special_tokens=body.add_special_tokens is not False, param="prompt"
    )


def check_ids(ids: list[int], vocab_size: int, *, param: str) -> list[int]:
    """The same ids; 400 if one is not a row of the model's embedding."""
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise ApiError(
                400,
                f"{param}: token id {token_id} at position {position} is not in "
                f"0..{vocab_size - 1}",
                param=param,
            )
    return ids


def echoed(
    body: CompletionRequest | ChatRequest,
    number: int,
    prompt_ids: list[int],
    text_model: TextModel,
) -> str | None:
    """The text of a prompt whose answer begins with it; None where it does not."""
    if not isinstance(body, CompletionRequest) or not body.echo:
        return None
    prompt = body.prompts[number]
    if isinstance(prompt, str):
        return prompt
    return text_model.tokenizer.decode(prompt_ids, body.skip_special_tokens)


def max_new_tokens(prompt_ids: list[int], asked: int | None, ready: Ready) -> int:
    """Tokens that may be generated: what was asked, clamped to the context that is left."""
    left = ready.max_model_len - len(prompt_ids)
    return left if asked is None else min(asked, left)


async def _render(
    body: ChatRequest | TokenizeRequest,
    messages: Messages,
    text_model: TextModel,
    *,
    add_special_tokens: bool = False,
) -> list[int]:
    return await text_model.encode_chat(
        [message.model_dump() for message in messages],
        add_generation_prompt=body.adds_generation_prompt,
        continue_final_message=body.continue_final_message,
        template=body.chat_template,
        kwargs=body.chat_template_kwargs,
        add_special_tokens=add_special_tokens,
    )


def _check_length(ids: list[int], ready: Ready, *, param: str) -> list[int]:
    if not ids:
        raise ApiError(400, f"{param}: the prompt has no tokens", param=param)
    if len(ids) >= ready.max_model_len:
        raise ApiError(
            400,
            f"context_length_exceeded: this model's maximum context length is "
            f"{ready.max_model_len} tokens, but the prompt has {len(ids)} tokens, which leaves no "
            f"room for output. Shorten it to {ready.max_model_len - 1} tokens or fewer.",
            param=param,
        )
    return ids
