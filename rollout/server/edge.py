"""What every request passes first: the API key, the size limit, and the count for the metrics; and the last place for
what nobody foresaw. Plain ASGI, so that streams and disconnects pass through untouched."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from miles_k3.rollout.server.errors import ApiError, error_body
from miles_k3.rollout.server.metrics import Metrics

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready", "/openapi.json"})
UPLOAD_PATH = "/v1/adapters/upload"


class Edge:
    """Wraps the application. Without keys nobody is asked for one."""

    def __init__(
        self, app: ASGIApp, *, api_keys: Sequence[str], max_body_bytes: int, max_upload_bytes: int, metrics: Metrics
    ) -> None:
        self._app, self._metrics = app, metrics
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._max_body_bytes, self._max_upload_bytes = max_body_bytes, max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, answering = time.perf_counter(), 500, False

        async def watched(message: Message) -> None:
            nonlocal status, answering
            if message["type"] == "http.response.start":
                status, answering = message["status"], True
            await send(message)

        try:
            self._judge_key(scope)
            limited = _Limited(receive, scope, self._limit(scope))
            await self._app(scope, limited, watched)
        except ApiError as error:
            await JSONResponse(error.body, error.status_code, error.headers)(scope, receive, watched)
        except Exception as error:
            if answering:
                raise  # the server behind breaks the connection off: nothing else tells that an answer is not whole
            log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            failed = error_body(500, "the server failed on this request; its log says why")
            await JSONResponse(failed, 500)(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.answered(route, status, time.perf_counter() - began)
            log.debug("%s %s %d", scope["method"], scope["path"], status)

    def _limit(self, scope: Scope) -> int:
        return self._max_upload_bytes if scope["path"] == UPLOAD_PATH else self._max_body_bytes

    def _judge_key(self, scope: Scope) -> None:
        """Every key is compared, by digest and in constant time, so that the time tells nothing."""
        if not self._digests or scope["path"] in OPEN_PATHS:
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
            )


class _Limited:
    """`receive` that refuses bodies over the limit: at once where the length is announced, else when it is passed."""

    def __init__(self, receive: Receive, scope: Scope, limit: int) -> None:
        self._receive, self._limit, self._seen = receive, limit, 0
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > limit:
            self._refuse()

    async def __call__(self) -> Message:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self._seen > self._limit:
            self._refuse()
        return message

    def _refuse(self) -> None:
        raise ApiError(413, f"the body is larger than the limit of {self._limit} bytes", code="body_too_large")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
