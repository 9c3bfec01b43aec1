"""ASGI middleware before everything else: the API key, and bounds on the size and time of a request's body."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from types import MappingProxyType

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ep_runtime.frontend.api.errors import ApiError, error_response

OPEN_PATHS = ("/health", "/ping", "/ready", "/metrics")


class Guard:
    """Refuses requests without a valid key (401) and bodies that are too large (413) or too slow (408), while they are read.

    A body is in memory until its answer is complete: all of them together may have `max_held` bytes (429). `larger` gives paths
    that take more than `max_bytes`.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: tuple[str, ...],
        max_bytes: int,
        max_held: int,
        body_seconds: float,
        larger: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in api_keys)
        self._max_bytes = max_bytes
        self._larger = larger
        self._max_held = max_held
        self._held = 0
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        most = self._larger.get(path, self._max_bytes)
        error = self._refusal(path, headers, most)
        if error is not None:
            await error_response(error)(scope, receive, send)
            return
        body = _Body(asyncio.get_running_loop().time() + self._body_seconds, most)
        try:
            await self._app(scope, self._bounded(receive, body), send)
        finally:
            self._held -= body.size

    def _refusal(self, path: str, headers: Headers, most: int) -> ApiError | None:
        if self._keys and path not in OPEN_PATHS and not self._authorized(headers.get("authorization", "")):
            return ApiError(401, "Incorrect API key; send it as: Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > most:
            return too_large(most)
        return None

    def _authorized(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        # Every key is compared, so that the time does not tell which one was near.
        matches = [secrets.compare_digest(given.strip().encode("latin-1"), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    def _bounded(self, receive: Receive, state: _Body) -> Receive:
        """A receive that counts the body. After the body it waits without limit, for the client's disconnect."""

        async def bounded() -> Message:
            if state.complete:
                return await receive()
            try:
                async with asyncio.timeout_at(state.deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"The body did not arrive within {self._body_seconds:g} s", code="request_timeout") from None
            size = len(message.get("body", b""))
            state.size += size
            self._held += size
            state.complete = not message.get("more_body", False)
            if state.size > state.most:
                raise too_large(state.most)
            if self._held > self._max_held:
                raise ApiError(429, "The bodies of unfinished requests fill the server", code="queue_full", retry_after=1)
            return message

        return bounded


def too_large(most: int) -> ApiError:
    """The 413 for a body of more than `most` bytes."""
    return ApiError(413, f"The body is larger than {most} bytes", code="request_too_large")


class _Body:
    """How much of a body has come, how much may, and until when."""

    __slots__ = ("complete", "deadline", "most", "size")

    def __init__(self, deadline: float, most: int) -> None:
        self.deadline = deadline
        self.most = most
        self.size = 0
        self.complete = False
