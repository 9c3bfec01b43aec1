"""How a generation becomes an HTTP answer, streamed or whole; shared by both generation endpoints."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec
from fastapi import Request
from starlette.responses import Response

from ep_runtime.frontend.api.errors import ApiError, error_dict
from ep_runtime.frontend.api.streaming import DONE, EventStream, sse, while_connected
from ep_runtime.frontend.choice import Choice, ChoiceDelta
from ep_runtime.frontend.context import Frontend
from ep_runtime.frontend.generation import Generation
from ep_runtime.frontend.metrics import Metrics


class Formatter(Protocol):
    """Writes deltas in an endpoint's format."""

    def chunks(self, delta: ChoiceDelta) -> bytes:
        """Events for one delta of a stream, empty when it shows nothing."""

    def closing(self) -> bytes:
        """Events after the last delta."""

    def add(self, delta: ChoiceDelta) -> None:
        """Keep a delta for `whole`."""

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""


def usage(prompts: list[list[int]], choices: list[Choice], *, looped: bool) -> dict[str, Any]:
    """Token counts. Each prompt counts once, however many samples it has (choices are ordered by prompt, then sample).

    `looped`: tokens may run more than one loop, and the mean of those that they ran is told.
    """
    prompt_tokens = sum(len(ids) for ids in prompts)
    completion_tokens = sum(choice.generated for choice in choices)
    samples = len(choices) // len(prompts)
    cached = sum(choice.cached or 0 for choice in choices[::samples])
    counts = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if looped:
        rows = sum(choice.decoded for choice in choices)
        counts["completion_tokens_details"] = {"mean_loops": sum(choice.loops for choice in choices) / rows if rows else None}
    return counts


def outcome_of(generation: Generation) -> str:
    """`ok`, the status of the failure, or `disconnected`."""
    if generation.failure is not None:
        return str(generation.failure.status_code)
    return "ok" if generation.finished else "disconnected"


async def answer(
    request: Request, front: Frontend, generation: Generation, formatter: Formatter, stream: bool, group: str
) -> Response:
    """Wait for the first delta (so that an error is still an HTTP status), then stream or collect. Raises ApiError, ClientGone."""
    streaming = False
    headers = {"X-Request-Id": group}
    try:
        first = await while_connected(request.receive, generation.take())
        if stream:
            streaming = True
            path = request.scope["route"].path
            return EventStream(
                stream_events(first, generation, formatter),
                generation.overflow,
                lambda: close_stream(front.metrics, path, generation),
                headers,
            )
        await while_connected(request.receive, collect(first, generation, formatter))
        return Response(msgspec.json.encode(formatter.whole()), media_type="application/json", headers=headers)
    finally:
        if not streaming:
            generation.cancel()


async def collect(first: list[ChoiceDelta], generation: Generation, formatter: Formatter) -> None:
    """Feed every delta to the formatter."""
    deltas = first
    while deltas:
        for delta in deltas:
            formatter.add(delta)
        deltas = await generation.take()


async def stream_events(first: list[ChoiceDelta], generation: Generation, formatter: Formatter) -> AsyncGenerator[bytes, None]:
    """The events of a stream, one piece of bytes for all that has come; an error in its middle is an event before the end mark."""
    deltas = first
    try:
        while deltas:
            events = b"".join([formatter.chunks(delta) for delta in deltas])
            if events:
                yield events
            deltas = await generation.take()
        yield formatter.closing() + DONE
    except ApiError as error:
        yield sse(error_dict(error.status_code, error.message, error.param, error.code)) + DONE


def close_stream(metrics: Metrics, endpoint: str, generation: Generation) -> None:
    """Whatever ended the stream: free its sequences and count it."""
    metrics.requests.labels(endpoint, outcome_of(generation)).inc()
    metrics.request_seconds.labels(endpoint).observe(generation.clock() - generation.started)
    generation.cancel()
