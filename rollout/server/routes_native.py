"""/generate: tokens in, tokens out. /v1/adapters: load, unload, list, pin."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from miles_k3.rollout.server.adapters import uploaded
from miles_k3.rollout.server.errors import ApiError
from miles_k3.rollout.server.flight import Flight, Stream, answer_or_gone
from miles_k3.rollout.server.names import BASE, Served
from miles_k3.rollout.server.routes_openai import WHOLE_OR_STREAM, dump
from miles_k3.rollout.server.schemas import GenerateBody, LoadBody
from miles_k3.rollout.server.state import Server
from miles_k3.types import SamplingParams

TAR = "application/x-tar"
_TAR_BODY = {"requestBody": {"required": True, "content": {TAR: {"schema": {"type": "string", "format": "binary"}}}}}
Version = Annotated[int, Path(ge=0, lt=2**63)]


def generate_routes(server: Server) -> APIRouter:
    router = APIRouter(tags=["Tokens"])

    @router.post("/generate", response_model=None, responses=WHOLE_OR_STREAM)
    async def generate(body: GenerateBody, request: Request) -> Response:
        version = _version_of(server, body)
        server.judge_tokens(body.input_ids, "input_ids")
        asked = body.sampling_params.max_new_tokens
        server.max_new_tokens(len(body.input_ids), asked, "max_new_tokens")
        flight = server.begin([(body.input_ids, _params(server, body))], version=version, streams=body.stream)
        if body.stream:
            return Stream(flight, _events(flight), dump, reader_timeout_s=server.options.reader_timeout_s)

        async def whole() -> Response:
            [last] = [event async for event in _events(flight)]
            return Response(dump(last), media_type="application/json")

        return await answer_or_gone(request, flight, whole())

    return router


async def _events(flight: Flight) -> AsyncIterator[dict[str, Any]]:
    """New tokens, again and again; the last event says why the answer ended. One event where nothing streams."""
    version = flight.generations[0].version
    async for _, news in flight.news():
        reason = None if news.completion is None else str(news.completion.finish_reason)
        yield {
            "output_ids": list(news.tokens),
            "logprobs": list(news.logprobs),
            "finish_reason": reason,
            "adapter_version": version,
        }


def _version_of(server: Server, body: GenerateBody) -> int:
    names = server.adapters.names
    if body.model is not None:
        return names.version_of(body.model)
    if body.adapter_version is None:
        return names.newest
    return BASE if body.adapter_version == BASE else names.get(body.adapter_version).version


def _params(server: Server, body: GenerateBody) -> SamplingParams:
    given = body.sampling_params
    stop_token_ids = (server.config.eos_token_id,) if given.stop_token_ids is None else tuple(given.stop_token_ids)
    return SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        max_new_tokens=given.max_new_tokens,
        stop=tuple(given.stop),
        stop_token_ids=stop_token_ids,
        seed=secrets.randbits(63) if given.seed is None else given.seed,
    )


def adapter_routes(server: Server) -> APIRouter:
    router = APIRouter(prefix="/v1/adapters", tags=["Adapters"])
    adapters = server.adapters

    @router.get("")
    async def list_adapters() -> dict[str, Any]:
        """Loaded adapters, oldest first; `newest` is what the model's plain name means."""
        return {"newest": adapters.names.newest, "data": [_shown(a) for a in adapters.names.served()]}

    @router.post("")
    async def load(body: LoadBody) -> dict[str, Any]:
        folder = adapters.folder_below_root(body.path)
        served, gone = await adapters.load(folder, name=body.name, version=body.version, pin=body.pin, source=body.path)
        return {**_shown(served), "replaced": gone}

    @router.post("/upload", openapi_extra=_TAR_BODY)
    async def upload(
        request: Request,
        name: Annotated[str | None, Query(min_length=1, max_length=64)] = None,
        version: Annotated[int | None, Query(ge=0, lt=2**63)] = None,
        pin: bool = False,
    ) -> dict[str, Any]:
        """The body is an uncompressed tar archive of adapter_config.json and adapter_model.safetensors."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != TAR:
            raise ApiError(415, f"expected content-type {TAR}", code="bad_content_type")
        async with uploaded(request.stream()) as folder:
            served, gone = await adapters.load(folder, name=name, version=version, pin=pin, source="upload")
        return {**_shown(served), "replaced": gone}

    @router.get("/{version}")
    async def show(version: Version) -> dict[str, Any]:
        return _shown(adapters.names.get(version))

    @router.delete("/{version}")
    async def unload(version: Version) -> dict[str, Any]:
        """No new request gets it; those that have it are served to the end."""
        return _shown(await adapters.unload(version))

    @router.put("/{version}/pin")
    async def pin(version: Version) -> dict[str, Any]:
        """No later load takes its place."""
        return _shown(await adapters.pin(version, True))

    @router.delete("/{version}/pin")
    async def unpin(version: Version) -> dict[str, Any]:
        return _shown(await adapters.pin(version, False))

    return router


def _shown(adapter: Served) -> dict[str, Any]:
    return asdict(adapter)
