"""/health: the process answers. /ready: the engine does, and every rank of it moves."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from ep_runtime.frontend.context import frontend_of

router = APIRouter(tags=["health"])


class HealthResponse(BaseModel):
    """`epoch` is null while no engine runs; `reason` says why the server is not ready."""

    status: str
    epoch: int | None = None
    reason: str | None = None


@router.get("/health", response_model=HealthResponse)
async def health(request: Request) -> Response:
    """200 whenever this process answers; `reason` is /ready's."""
    front = frontend_of(request)
    return JSONResponse({"status": "ok", "epoch": front.engine.epoch, "reason": front.unready_reason()})


@router.get(
    "/ready", response_model=HealthResponse, responses={503: {"model": HealthResponse, "description": "Not ready, and why"}}
)
async def ready(request: Request) -> Response:
    """200 when requests are served now; 503 with the reason during load, recovery, drain, or when a rank does not move."""
    front = frontend_of(request)
    reason = front.unready_reason()
    body = {"status": "ready" if reason is None else "not ready", "epoch": front.engine.epoch, "reason": reason}
    return JSONResponse(body, 200 if reason is None else 503, headers=None if reason is None else {"Retry-After": "5"})
