"""Refusals, all in OpenAI's JSON shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

_TAGS = ("system", "user", "assistant", "tool")  # of the union of messages
_UNREADABLE = "the body can't be read as JSON: it is not UTF-8, nested too deeply, or has a number of too many digits"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """What a client is told instead of an answer. `param` names the parameter at fault, `code` the reason."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        super().__init__(status, detail=message, headers=headers)
        self.message, self.code, self.param = message, code, param

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status_code, self.message, code=self.code, param=self.param)


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The JSON of a refusal."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install_handlers(app: FastAPI) -> None:
    """Every refusal leaves in the same shape."""

    @app.exception_handler(StarletteHTTPException)
    async def _refused(request: Request, error: StarletteHTTPException) -> JSONResponse:
        if isinstance(error, ApiError):
            body = error.body
        else:
            detail = _UNREADABLE if error.detail == "There was an error parsing the body" else error.detail
            message = f"{request.method} {request.url.path}: {detail}"
            body = error_body(error.status_code, message)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        sentences, param = explain(error.errors(), _fields_of(request))
        return JSONResponse(error_body(400, "; ".join(sentences), param=param), status_code=400)


def _fields_of(request: Request) -> Sequence[str]:
    """The parameters of the body that the route takes."""
    field = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(field, "field_info", None), "annotation", None)
    return tuple(getattr(model, "model_fields", ()))


def explain(found: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> tuple[list[str], str | None]:
    """pydantic's findings as sentences, one a parameter, and the first parameter at fault."""
    complaints: dict[str, list[str]] = {}
    for error in found:
        name = "" if error["type"] == "json_invalid" else ".".join(_place(error["loc"][1:]))
        complaints.setdefault(name, []).append(_complaint(error, fields))
    sentences = [f"{name or 'the body'} {' or '.join(dict.fromkeys(c))}" for name, c in complaints.items()]
    return sentences, next((name for name in complaints if name), None)


def _place(loc: Sequence[str | int]) -> list[str]:
    """Where in the body, without the names that pydantic gives to the members of a union."""
    place: list[str] = []
    for part in loc:
        tag = part in _TAGS and place[-1:] and place[-1].isdigit()
        if isinstance(part, int) or (part.isidentifier() and not part[0].isupper() and not tag):
            place.append(str(part))
    return place


def _complaint(error: Mapping[str, Any], fields: Sequence[str]) -> str:
    kind, given = error["type"], error.get("input")
    if kind == "extra_forbidden":
        known = f"; supported are {', '.join(fields)}" if len(error["loc"]) == 2 and fields else ""
        return f"is not a supported parameter{known}"
    if kind == "json_invalid":
        return f"is not JSON at character {error['loc'][-1]}: {error['ctx']['error']}"
    if isinstance(given, bytes):
        return "was not read as JSON; send it with content-type: application/json"
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return f"is refused: {error['msg'].removeprefix('Value error, ')}"
    shown = repr(given)
    return f"is {shown if len(shown) < 60 else type(given).__name__}: {error['msg'][0].lower()}{error['msg'][1:]}"
