"""/metrics, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse, Response

from ep_runtime.frontend.context import frontend_of

router = APIRouter(tags=["health"])


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms in Prometheus' text format."""
    front = frontend_of(request)
    front.metrics.journal_sequences.set(len(front.journal))
    front.metrics.image_bytes.set(front.image_memory.held)
    front.metrics.ready.set(front.unready_reason() is None)
    return Response(generate_latest(front.metrics.registry), media_type=CONTENT_TYPE_LATEST)
