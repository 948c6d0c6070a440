"""The application: every route, behind the edge."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.middleware import Middleware

from miles_k3 import __version__
from miles_k3.rollout.server.edge import Edge
from miles_k3.rollout.server.errors import install_handlers
from miles_k3.rollout.server.routes_native import adapter_routes, generate_routes
from miles_k3.rollout.server.routes_openai import openai_routes
from miles_k3.rollout.server.routes_status import status_routes
from miles_k3.rollout.server.state import Server


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorFields


_REASONS = {
    400: "The request is malformed, or asks for what this server doesn't do.",
    401: "The API key is missing or wrong.",
    403: "The path is not below --adapter-root, or may not be read.",
    404: "No such model, adapter or folder.",
    409: "The adapter's version is not the next one, or every slot is in use.",
    413: "The body is too large.",
    415: "The body has another content type.",
    429: "The queue is full; Retry-After says when to come again.",
    500: "The engine or the server failed on this request.",
    503: "The server is shutting down.",
    507: "The server's disk is too full for the upload.",
}


def make_app(server: Server) -> FastAPI:
    options = server.options
    edge = Middleware(
        Edge, api_keys=options.api_keys, max_body_bytes=options.max_body_bytes,
        max_upload_bytes=options.max_upload_bytes, metrics=server.metrics,
    )  # fmt: skip
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": text} for status, text in _REASONS.items()
    }
    # The interactive pages of FastAPI load their scripts from elsewhere, so there are none.
    app = FastAPI(
        title="miles-k3", version=__version__, middleware=[edge], responses=responses, docs_url=None, redoc_url=None,
    )  # fmt: skip
    install_handlers(app)
    for router in (
        openai_routes(server),
        generate_routes(server),
        adapter_routes(server),
        status_routes(server),
    ):
        app.include_router(router)
    return app
