"""OpenAI's error format for every failure: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

log = logging.getLogger(__name__)

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ABSENT = ("missing", "extra_forbidden")
NO_BRANCH = ("union_tag_not_found", "union_tag_invalid")


class ErrorBody(BaseModel):
    """What went wrong. `param` names the offending field, where there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorBody


class ApiError(HTTPException):
    """An answer other than success. `retry_after` is in seconds and becomes the header."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        headers = None if retry_after is None else {"Retry-After": str(max(1, math.ceil(retry_after)))}
        super().__init__(status, message, headers)
        self.message = message
        self.param = param
        self.code = code


def shutting_down() -> ApiError:
    """The one answer of a server that drains, to a request that comes and to one that the end of the drain cuts."""
    return ApiError(503, "The server is shutting down", code="draining", retry_after=5)


def stopped(reason: str) -> ApiError:
    """The answer of a server whose engine will not come back."""
    return ApiError(503, f"The engine has stopped: {reason}", code="not_ready", retry_after=30)


def error_type(status: int) -> str:
    """OpenAI's word for a status."""
    return ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_dict(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error body as plain data; also the payload of an error event inside a stream."""
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}


def error_response(error: ApiError) -> Response:
    """The HTTP answer for an error."""
    body = error_dict(error.status_code, error.message, error.param, error.code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def locate(loc: Sequence[int | str], body: object, kind: str) -> str:
    """The dotted path of a validation error inside the request body, without the tags of union branches; "" for the body itself."""
    path: list[str] = []
    here: Any = body
    for place, step in enumerate(loc, start=1):
        in_list = isinstance(here, list) and isinstance(step, int) and 0 <= step < len(here)
        if in_list or (isinstance(here, Mapping) and step in here):
            here = here[step]
        elif not (isinstance(here, Mapping) and kind in ABSENT and place == len(loc)):
            continue
        path.append(str(step))
    return ".".join(path)


def told(item: Mapping[str, Any]) -> tuple[list[int | str], str, str]:
    """Place, kind and message of one validation error. That a union finds no branch is said of the field that names the branch."""
    loc = [step for step in item["loc"] if step not in ("body", "query", "path")]
    if item["type"] not in NO_BRANCH:
        return loc, item["type"], item["msg"]
    loc.append(item["ctx"]["discriminator"].strip("'"))
    if item["type"] == "union_tag_not_found":
        return loc, "missing", "Field required"
    return loc, item["type"], f"Input should be one of {item['ctx']['expected_tags']}"


def describe_validation(error: RequestValidationError) -> tuple[str, str | None]:
    """Message and `param` of the first field that failed.

    The branches of a union fail each in its own way: a refusal of our own tells most, then the branch that got furthest.
    """
    found: list[tuple[bool, str, str]] = []
    for item in error.errors():
        loc, kind, message = told(item)
        param = item.get("ctx", {}).get("param")
        if not loc and param is None:
            message = "The body must be a JSON object"
        found.append((param is not None, param or locate(loc, error.body, kind), message))
    top = found[0][1].partition(".")[0]
    _, param, message = max((entry for entry in found if entry[1].partition(".")[0] == top), key=lambda e: (e[0], e[1].count(".")))
    if message == found[0][2]:
        # Alike deep: tell what every branch would have taken.
        message = "; or: ".join(dict.fromkeys(text for _, other, text in found if other == param))
    named = not param or re.search(rf"\b{re.escape(param)}\b", message)
    return (message if named else f"{param}: {message}"), param or None


async def on_http_error(request: Request, error: Exception) -> Response:
    """ApiError as it says; the framework's own 404 and 405 in the same format."""
    if isinstance(error, ApiError):
        return error_response(error)
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    return JSONResponse(error_dict(error.status_code, f"{error.detail}: {where}"), error.status_code, headers=error.headers)


async def on_validation_error(request: Request, error: Exception) -> Response:
    """A request that does not fit its model: 400 that names the field."""
    assert isinstance(error, RequestValidationError)
    message, param = describe_validation(error)
    return JSONResponse(error_dict(400, message, param), 400)


async def on_unexpected(request: Request, error: Exception) -> Response:
    """A bug of ours: 500 without details; the server's log has the traceback."""
    log.error("unexpected error in %s %s: %s", request.method, request.url.path, type(error).__name__)
    return JSONResponse(error_dict(500, "internal error"), 500)


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of `app` speak one format."""
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(Exception, on_unexpected)


DESCRIPTIONS = {
    400: "The request is malformed, contradictory, unsupported or too long for the model; `param` names the field",
    401: "The API key is missing or wrong",
    404: "Unknown path or model",
    408: "The body did not arrive in time",
    413: "The body is larger than the server accepts",
    415: "The body is not application/json",
    429: "The queue is full; see Retry-After",
    500: "The request failed in the server",
    503: "No engine is ready, or the server is draining; see Retry-After",
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI declaration of these error answers."""
    return {status: {"model": ErrorResponse, "description": DESCRIPTIONS[status]} for status in statuses}


BODY_ERRORS = error_responses(400, 401, 404, 408, 413, 415, 500, 503)
GENERATION_ERRORS = error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503)
