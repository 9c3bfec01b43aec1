"""Answers that end when their client goes away: server-sent events, and a watch over whatever is computed for a plain answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client disconnected before its answer was complete."""


def sse(payload: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; raises ClientGone, with `work` cancelled, when the client goes first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _end([task, watcher])


class EventStream(Response):
    """Sends events as they come. Ends at once when the client goes away or `overflow` is set (it reads too slowly).

    `on_close` runs exactly once, however the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], overflow: asyncio.Event, on_close: Callable[[], None], headers: dict[str, str]
    ) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._overflow = overflow
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        sender = asyncio.ensure_future(self._send(send))
        others = [asyncio.ensure_future(disconnected(receive)), asyncio.ensure_future(self._overflow.wait())]
        try:
            await asyncio.wait({sender, *others}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            self._on_close()
            await _end([sender, *others])
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _end(tasks: list[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    # Results and errors of those that ended by themselves were taken by the caller.
    await asyncio.gather(*tasks, return_exceptions=True)
