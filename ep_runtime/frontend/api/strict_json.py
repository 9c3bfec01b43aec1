"""Request bodies: UTF-8 JSON without NaN, lone surrogates or bottomless nesting, refused with a 400 that says which."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response

from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.api.streaming import ClientGone, EventStream
from ep_runtime.frontend.context import frontend_of

MAX_DEPTH = 100


def parse_json(data: bytes) -> Any:
    """Decode strictly; raises ApiError 400."""
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise ApiError(400, f"The JSON body is nested deeper than {MAX_DEPTH} levels", code="invalid_json") from None
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None
    if depth_exceeds(value, MAX_DEPTH):
        raise ApiError(400, f"The JSON body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")
    return value


def depth_exceeds(value: object, limit: int) -> bool:
    """Whether containers in `value` nest deeper than `limit`. Iterative, so that depth costs no stack."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


class StrictRequest(Request):
    """A request whose `json()` is `parse_json`."""

    async def json(self) -> Any:
        """The decoded body; read once."""
        if not hasattr(self, "_json"):
            self._json = parse_json(await self.body())
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
            return await handler(StrictRequest(request.scope, request.receive))

        return counted
