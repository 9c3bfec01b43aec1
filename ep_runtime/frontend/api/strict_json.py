"""Request bodies: UTF-8 JSON without NaN, lone surrogates or bottomless nesting, refused with a 400 that says which."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.api.streaming import ClientGone, EventStream
from ep_runtime.frontend.context import frontend_of

MAX_DEPTH = 100
MAX_KEYS = 4096
"""Of one object; a logit_bias is the largest that clients send."""
MAX_CONTAINERS = 65_536
ESCAPE = re.compile(rb"\\(?:u([\da-fA-F]{4})|.)", re.DOTALL)
"""One escape of a JSON string; the group is of those that give a UTF-16 unit."""
MOST_SEARCHED = 2**16
"""Bytes of a broken body that are looked through for what broke it, on the thread that serves all streams."""
PIECE = 2**20
"""Bytes that are looked through without a pause, in which no other thread runs."""


def parse_json(data: bytes) -> Any:
    """Decode strictly; raises ApiError 400."""
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise ApiError(400, f"The JSON body is nested deeper than {MAX_DEPTH} levels", code="invalid_json") from None
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        lone = len(data) <= MOST_SEARCHED and has_lone_surrogate(data)
        why = "it has a lone surrogate, half of a pair of \\uXXXX escapes" if lone else str(error)
        raise ApiError(400, f"The body is not valid JSON: {why}", code="invalid_json") from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH or data.count(b":") > MAX_KEYS:
        problem = excess(value)
        if problem is not None:
            raise ApiError(400, f"The JSON body {problem}", code="invalid_json")
    return value


def has_lone_surrogate(data: bytes) -> bool:
    """Whether an escape in a body is half of a pair whose other half is not beside it; one that the body ends behind is not."""
    high_ends = -1
    for escape in ESCAPE.finditer(data):
        unit = int(escape[1], 16) if escape[1] else 0
        low = 0xDC00 <= unit < 0xE000
        paired = low and escape.start() == high_ends
        if not paired and (low or high_ends >= 0):
            return True
        high_ends = escape.end() if 0xD800 <= unit < 0xDC00 else -1
    return 0 <= high_ends < len(data)


def excess(value: object) -> str | None:
    """What in `value` passes our limits, None when all is well. Iterative, so that depth costs no stack.

    Every value is checked field by field on the thread that serves all streams: a body of a million objects or keys holds them up
    for seconds.
    """
    level, total = [value], 0
    for _ in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for outer in level:
            if isinstance(outer, dict):
                if len(outer) > MAX_KEYS:
                    return f"has an object of {len(outer)} keys; the server takes {MAX_KEYS}"
                inner.extend(item for item in outer.values() if isinstance(item, (dict, list)))
            elif isinstance(outer, list):
                inner.extend(item for item in outer if isinstance(item, (dict, list)))
            if total + len(inner) > MAX_CONTAINERS:
                return f"has more than {MAX_CONTAINERS} objects and lists"
        total += len(inner)
        if not inner:
            return None
        level = inner
    return f"is nested deeper than {MAX_DEPTH} levels"


def parse_large(data: bytes, usual: int) -> Any:
    """`parse_json` of a body over the usual size; raises ApiError 413 for one that is not large because of an image.

    An image is one long text, while values by the million hold up the thread that serves all streams. A body of the usual size has
    at most one value for two of its bytes.
    """
    pieces = range(0, len(data), PIECE)
    if sum(data.count(mark, start, start + PIECE) for mark in (b",", b"[", b"{") for start in pieces) > usual // 2:
        raise ApiError(413, f"A body with so many values may have {usual} bytes", code="request_too_large")
    return parse_json(data)


class StrictRequest(Request):
    """A request whose `json()` is `parse_json`."""

    async def arrive(self) -> None:
        """Read the body. Raises ClientGone when the client leaves on the way: the framework would take that for a bad body."""
        try:
            await self.body()
        except ClientDisconnect:
            raise ClientGone from None

    async def json(self) -> Any:
        """The decoded body; read once."""
        if not hasattr(self, "_json"):
            front, body = frontend_of(self), await self.body()
            usual = front.config.max_request_bytes
            if len(body) > usual:
                loop = asyncio.get_running_loop()
                self._json = await loop.run_in_executor(front.large_bodies, parse_large, body, usual)
            else:
                self._json = parse_json(body)
        return self._json


class StrictRoute(APIRoute):
    """A route that takes application/json alone, decoded strictly, and counts its outcomes."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the framework's handler."""
        handler = super().get_route_handler()

        async def counted(request: Request) -> Response:
            started = time.monotonic()
            outcome = "500"
            metrics = frontend_of(request).metrics
            try:
                response = await checked(request)
                outcome = str(response.status_code) if response.status_code >= 400 else "ok"
            except ClientGone:
                outcome = "disconnected"
                return Response(status_code=499)
            except ApiError as error:
                outcome = str(error.status_code)
                raise
            except RequestValidationError:
                outcome = "400"
                raise
            finally:
                # A stream counts itself when it ends.
                if not (outcome == "ok" and isinstance(response, EventStream)):
                    metrics.requests.labels(self.path, outcome).inc()
                    metrics.request_seconds.labels(self.path).observe(time.monotonic() - started)
            return response

        async def checked(request: Request) -> Response:
            media = request.headers.get("content-type", "").split(";")[0].strip().lower()
            if media != "application/json":
                raise ApiError(
                    415, f"Content-Type must be application/json, not {media or 'absent'!r}", code="unsupported_media_type"
                )
            strict = StrictRequest(request.scope, request.receive)
            await strict.arrive()
            return await handler(strict)

        return counted
