"""The routes: what each URL does, in terms of the other modules."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import PlainTextResponse, Response

import neojax
from neojax.serve import errors
from neojax.serve.answer import Answer
from neojax.serve.body import read_body
from neojax.serve.engine_client import NewRequest
from neojax.serve.errors import ApiError
from neojax.serve.generation import Choice, TextGeneration
from neojax.serve.prompts import (
    chat_prompts,
    check_ids,
    completion_prompts,
    echoed,
    max_new_tokens,
    tokenize_prompt,
)
from neojax.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from neojax.serve.shapes import ChatShape, CompletionShape
from neojax.serve.state import ServeState

# What clients of other engines may ask for; anything else unknown is a plain 404.
_NOT_SERVED = {
    "/v1/embeddings": "it generates text only",
    "/v1/responses": "use /v1/chat/completions",
    "/v1/messages": "use /v1/chat/completions",
    "/v1/audio/transcriptions": "it reads text only",
    "/v1/images/generations": "it generates text only",
    "/v1/load_lora_adapter": "adapters are not supported; merge them into the checkpoint",
    "/v1/rerank": "it generates text only",
    "/v1/score": "it generates text only",
}
# What describes a field, whatever its type.
_SHOWN = ("title", "description", "default")
_REF = "#/components/schemas/{model}"


def create_app(state: ServeState) -> FastAPI:
    """The application over one server's state."""
    app = FastAPI(title="neojax", version=neojax.__version__)
    errors.install(app)
    created = int(time.time())

    @app.post("/v1/completions", **_streamed(CompletionRequest, "Continue one or more prompts"))
    async def completions(request: Request) -> Response:
        arrival_s = time.monotonic()
        text_model, _, ready = state.require_ready()
        body = await read_body(request, CompletionRequest)
        model = _served_name(state, body.model)
        state.check_size(len(body.prompts) * (body.n or 1))
        prompts = await completion_prompts(body, text_model, ready)
        asked = body.DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        request_id = _request_id(request, body)
        return _generate(state, body, prompts, asked, CompletionShape, model, request_id, arrival_s)

    @app.post("/v1/chat/completions", **_streamed(ChatRequest, "Answer a conversation"))
    async def chat_completions(request: Request) -> Response:
        arrival_s = time.monotonic()
        text_model, _, ready = state.require_ready()
        body = await read_body(request, ChatRequest)
        model = _served_name(state, body.model)
        state.check_size(body.n or 1)
        prompts = await chat_prompts(body, text_model, ready)
        asked = (
            body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        )
        request_id = _request_id(request, body)
        return _generate(state, body, prompts, asked, ChatShape, model, request_id, arrival_s)

    @app.get("/v1/models", summary="The model that is served")
    async def models() -> Response:
        cards = [_model_card(state, name, created) for name in state.model_names]
        return _json({"object": "list", "data": cards})

    @app.get(
        "/v1/models/{model:path}",
        summary="One model",
        responses={404: {"description": "Unknown model"}},
    )
    async def model(model: str) -> Response:
        return _json(_model_card(state, _served_name(state, model), created))

    @app.post("/tokenize", **_documented(TokenizeRequest, "Token ids of a text or conversation"))
    async def tokenize(request: Request) -> Response:
        text_model, _, ready = state.require_ready()
        body = await read_body(request, TokenizeRequest)
        _served_name(state, body.model)
        ids = await tokenize_prompt(body, text_model)
        return _json({"count": len(ids), "max_model_len": ready.max_model_len, "tokens": ids})

    @app.post("/detokenize", **_documented(DetokenizeRequest, "Text of token ids"))
    async def detokenize(request: Request) -> Response:
        text_model, _, ready = state.require_ready()
        body = await read_body(request, DetokenizeRequest)
        _served_name(state, body.model)
        ids = check_ids(body.tokens, ready.vocab_size, param="tokens")
        return _json({"prompt": text_model.tokenizer.decode(ids, skip_special_tokens=False)})

    @app.get("/health", **_probe("200 while requests are served, else 503 with the reason"))
    async def health() -> Response:
        if state.health_fault is not None:
            raise ApiError(503, state.health_fault)
        return _json({"status": "ok", "last_step_age_s": state.last_step_age_s})

    @app.get("/ready", **_probe("200 while new requests are taken, else 503 with the reason"))
    async def is_ready() -> Response:
        if state.fault is not None:
            raise ApiError(503, state.fault)
        return Response(status_code=200)

    @app.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version", summary="Version of the server")
    async def version() -> Response:
        return _json({"version": neojax.__version__})

    for path, instead in _NOT_SERVED.items():
        app.post(path, include_in_schema=False)(_not_served(path, instead))

    schemas = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
    app.openapi_schema = _with_schemas(app.openapi(), schemas)
    return app


def _not_served(path: str, instead: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise ApiError(501, f"{path} is not part of this server: {instead}")

    return refuse


def _with_schemas(openapi: dict[str, Any], schemas: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """The OpenAPI document with the bodies that the routes read themselves."""
    _, definitions = models_json_schema(
        [(schema, "validation") for schema in schemas], ref_template=_REF
    )
    for schema in schemas:
        definition = definitions["$defs"][schema.__name__]
        for name in definition["properties"].keys() - set(definition.get("required", ())):
            definition["properties"][name] = _or_null(definition["properties"][name])
    # The framework's own validation, which no route uses, is left out.
    openapi["components"] = {"schemas": definitions["$defs"]}
    for operations in openapi["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    return openapi


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field that may also be null, which means the default."""
    members = field.get("anyOf", [{k: v for k, v in field.items() if k not in _SHOWN}])
    if {"type": "null"} not in members:
        members = [*members, {"type": "null"}]
    return {"anyOf": members, **{k: v for k, v in field.items() if k in _SHOWN}}


def _generate(
    state: ServeState,
    body: CompletionRequest | ChatRequest,
    prompts: list[list[int]],
    asked: int | None,
    shape: type[ChatShape | CompletionShape],
    model: str,
    request_id: str,
    arrival_s: float,
) -> Response:
    text_model, client, ready = state.require_ready()
    check_ids(body.stop_token_ids or [], ready.vocab_size, param="stop_token_ids")
    check_ids(list(body.logit_bias), ready.vocab_size, param="logit_bias")
    choices: list[Choice] = []
    for number_of_prompt, prompt_ids in enumerate(prompts):
        max_tokens = max_new_tokens(prompt_ids, asked, ready)
        try:
            params = body.sampling_params(max_tokens, text_model.defaults)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        echo = echoed(body, number_of_prompt, prompt_ids, text_model)
        for number in range(body.n or 1):
            # Choices of one prompt differ: each draws with its own seed.
            seed = None if params.seed is None else (params.seed + number) % 2**63
            choices.append(Choice(prompt_ids, dataclasses.replace(params, seed=seed), echo))
    timeout_s = state.config.request_timeout
    requests = [NewRequest(c.prompt_ids, dataclasses.asdict(c.params)) for c in choices]
    generation = TextGeneration(
        client.generate(request_id, requests),
        choices,
        text_model,
        state.metrics,
        arrival_s,
        admit=lambda: state.admit(len(choices)),
    )
    return Answer(
        generation,
        shape(
            request_id,
            model,
            text_model,
            include_usage=body.include_usage,
            prompt_logprobs=body.prompt_logprobs,
        ),
        num_choices=len(choices),
        num_prompt_tokens=sum(map(len, prompts)),
        stream=bool(body.stream),
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        deadline_s=None if timeout_s is None else arrival_s + timeout_s,
    )


def _served_name(state: ServeState, name: str | None) -> str:
    """The name of the model that a request asks for. Raises 404 for another model."""
    if name is not None and name not in state.model_names:
        served = ", ".join(state.model_names)
        message = f"the model {name[:200]!r} does not exist; served: {served}"
        raise ApiError(404, message, param="model")
    return name or state.model_names[0]


def _request_id(request: Request, body: CompletionRequest | ChatRequest) -> str:
    """The id in the answer, its header and the log: the body's, else the header's, else ours."""
    if body.request_id is not None:
        request.state.request_id = body.request_id
    return request.state.request_id


def _model_card(state: ServeState, name: str, created: int) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "neojax",
        "root": state.config.model,
        "max_model_len": None if state.ready is None else state.ready.max_model_len,
    }


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _documented(schema: type[BaseModel], summary: str) -> dict[str, Any]:
    """OpenAPI of a route that reads its body itself."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model=schema.__name__)}}}
    return {
        "summary": summary,
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
        "responses": {
            400: {"description": "Refused: the message names the field and what would work"},
            404: {"description": "Unknown model"},
            413: {"description": "Body too large"},
            503: {"description": "Loading, full, shutting down or failed; see Retry-After"},
        },
    }


def _streamed(schema: type[BaseModel], summary: str) -> dict[str, Any]:
    """Like `_documented`, for a route whose answer may be a stream of events."""
    route = _documented(schema, summary)
    route["responses"][200] = {
        "description": "The answer, or with stream: true its chunks as server-sent events",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
    return route


def _probe(summary: str) -> dict[str, Any]:
    """OpenAPI of a route that answers by its status alone."""
    refusal = {"description": "Not now: the body says why"}
    return {"summary": summary, "response_class": Response, "responses": {503: refusal}}
