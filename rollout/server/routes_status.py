"""/health, /metrics, /v1/stats, and the page at /."""

from __future__ import annotations

import asyncio
from importlib import resources
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from miles_k3.rollout.server.errors import ApiError
from miles_k3.rollout.server.state import Server

STATS_TIMEOUT_S = 10.0
# Everything on the page is in its one file, and nothing may be fetched from elsewhere or frame it.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def status_routes(server: Server) -> APIRouter:
    router = APIRouter(tags=["Status"])
    page = (resources.files("miles_k3.rollout.server") / "page.html").read_text()

    @router.get("/", include_in_schema=False)
    async def show_page() -> HTMLResponse:
        return HTMLResponse(page, headers=PAGE_HEADERS)

    @router.get("/health/live")
    async def live() -> JSONResponse:
        """200 while the engine's thread lives. `engine_step_s`: how long its current step has been running."""
        return _health(server, server.backend.alive)

    @router.get("/health")
    @router.get("/health/ready")
    async def ready() -> JSONResponse:
        """200 while new requests are taken; never waits for the engine."""
        return _health(server, server.backend.alive and server.ready and not server.gate.draining)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus' text format."""
        names = server.adapters.names
        text = server.metrics.text(
            await _stats(server),
            in_flight=server.gate.in_flight,
            capacity=server.gate.max_running + server.gate.max_queue,
            versions=[a.version for a in names.served()],
            newest=names.newest,
            draining=server.gate.draining,
        )
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @router.get("/v1/stats")
    async def stats() -> dict[str, Any]:
        """The engine's numbers and the server's, for the page."""
        return {
            "model": server.options.model_id,
            "state": _state(server),
            "newest": server.adapters.names.newest,
            "versions": [a.version for a in server.adapters.names.served()],
            "in_flight": server.gate.in_flight,
            "max_running": server.gate.max_running,
            "max_queue": server.gate.max_queue,
            "pages": server.num_pages,
            "engine": dict(await _stats(server)),
        }

    return router


def _health(server: Server, well: bool) -> JSONResponse:
    body = {"status": _state(server), "engine_step_s": round(server.backend.turn_age_s, 3)}
    return JSONResponse(body, 200 if well else 503)


def _state(server: Server) -> str:
    if not server.backend.alive:
        return "engine ended"
    return "draining" if server.gate.draining else "ready" if server.ready else "starting"


async def _stats(server: Server) -> Any:
    try:
        return await asyncio.wait_for(server.stats(), STATS_TIMEOUT_S)
    except TimeoutError:
        raise ApiError(
            503, f"the engine has been in one step for {server.backend.turn_age_s:.0f} s", code="engine_busy",
            retry_after_s=5,
        ) from None  # fmt: skip
