"""/v1/models, /v1/completions, /v1/chat/completions."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from miles_k3.rollout.server.chat import ChatReader
from miles_k3.rollout.server.errors import ApiError
from miles_k3.rollout.server.flight import Flight, Stream, answer_or_gone
from miles_k3.rollout.server.openai import Answer, ChatChoice, Choice, Fields, TextChoice, TokenText
from miles_k3.rollout.server.schemas import ChatBody, CompletionBody, SamplingBody
from miles_k3.rollout.server.state import Server
from miles_k3.rollout.server.text import UNFINISHED, AnswerText

# The 200 of a route that answers as one piece or as server-sent events.
WHOLE_OR_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}}
}
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

dump = partial(json.dumps, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def openai_routes(server: Server) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        names = server.adapters.names
        return {"object": "list", "data": [_model(server, name, v) for name, v in names.models().items()]}

    @router.get("/models/{model:path}")
    async def show_model(model: str) -> dict[str, Any]:
        return _model(server, model, server.adapters.names.version_of(model))

    @router.post("/completions", response_model=None, responses=WHOLE_OR_STREAM)
    async def complete(body: CompletionBody, request: Request) -> Response:
        return await _complete(server, body, request)

    @router.post("/chat/completions", response_model=None, responses=WHOLE_OR_STREAM)
    async def chat(body: ChatBody, request: Request) -> Response:
        return await _chat(server, body, request)

    return router


async def _complete(server: Server, body: CompletionBody, request: Request) -> Response:
    version = server.adapters.names.version_of(body.model)
    prompts = await _prompts(server, body)
    plans = []
    for prompt in prompts:
        asked = body.max_tokens if body.max_tokens is not None else COMPLETION_TOKENS
        limit = server.max_new_tokens(len(prompt), asked, "max_tokens")
        plans += [(prompt, params) for params in server.sampling(body, limit)]
    token_text = _token_text(server) if body.logprobs is not None else None
    flight = server.begin(plans, version=version, streams=bool(body.stream))
    choices = [
        TextChoice(
            AnswerText(server.chat.tokenizer, stop=params.stop, stop_token_ids=params.stop_token_ids), token_text
        )
        for _, params in plans
    ]
    answer = Answer(
        flight, choices, kind="text_completion", prefix="cmpl", model=body.model, prompt_tokens=sum(map(len, prompts))
    )
    return await _respond(server, request, body, flight, answer, None)


async def _chat(server: Server, body: ChatBody, request: Request) -> Response:
    version = server.adapters.names.version_of(body.model)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "give max_tokens or max_completion_tokens, not both", param="max_tokens")
    prompt = await server.chat.prompt(body)
    server.judge_tokens(prompt.token_ids, "messages")
    asked, param = (
        (body.max_tokens, "max_tokens")
        if body.max_completion_tokens is None
        else (body.max_completion_tokens, "max_completion_tokens")
    )
    limit = server.max_new_tokens(len(prompt.token_ids), asked, param)
    plans = [(prompt.token_ids, params) for params in server.sampling(body, limit)]
    token_text = _token_text(server) if body.logprobs else None
    flight = server.begin(plans, version=version, streams=bool(body.stream))
    choices: list[Choice] = [
        ChatChoice(ChatReader(server.chat, prompt, stop=params.stop, stop_token_ids=params.stop_token_ids), token_text)
        for _, params in plans
    ]
    answer = Answer(
        flight, choices, kind="chat.completion", prefix="chatcmpl", model=body.model,
        prompt_tokens=len(prompt.token_ids),
    )  # fmt: skip
    first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
    return await _respond(server, request, body, flight, answer, first)


async def _respond(
    server: Server, request: Request, body: SamplingBody, flight: Flight, answer: Answer, first: Fields | None
) -> Response:
    if body.stream:
        events = answer.chunks(usage=body.wants_usage, first=first)
        return Stream(flight, events, dump, reader_timeout_s=server.options.reader_timeout_s)

    async def whole() -> Response:
        return Response(dump(await answer.whole()), media_type="application/json")

    return await answer_or_gone(request, flight, whole())


async def _prompts(server: Server, body: CompletionBody) -> list[list[int]]:
    given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if given and isinstance(given[0], int):
        given = [given]
    prompts = [await server.chat.tokenize(p) if isinstance(p, str) else [int(t) for t in p] for p in given]  # pyright: ignore[reportGeneralTypeIssues]
    for prompt in prompts:
        server.judge_tokens(prompt, "prompt")
    return prompts


def _token_text(server: Server) -> TokenText:
    """Text and bytes of one token; bytes are null where the token is part of a character."""
    tokenizer = server.chat.tokenizer

    def spell(token: int) -> tuple[str, list[int] | None]:
        text = tokenizer.decode([token], skip_special_tokens=False)
        return text, None if UNFINISHED in text else list(text.encode())

    return spell


def _model(server: Server, name: str, version: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.adapters.names.created,
        "owned_by": "miles-k3",
        "adapter_version": version,
        "max_model_len": server.max_sequence_tokens,
    }
