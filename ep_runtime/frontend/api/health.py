"""/health and /ping: the process answers. /ready: the engine does, and every rank of it moves. /version: of what program."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from ep_runtime.frontend.api.errors import error_responses
from ep_runtime.frontend.context import frontend_of

router = APIRouter(tags=["health"])


class HealthResponse(BaseModel):
    """`epoch` is null while no engine runs; `reason` says why the server is not ready."""

    status: str
    epoch: int | None = None
    reason: str | None = None


class VersionResponse(BaseModel):
    """The version of this package."""

    version: str


# Balancers and clients ask with HEAD, which has GET's answer without its body; the document would only say everything twice.
@router.head("/health", include_in_schema=False)
@router.get("/health", response_model=HealthResponse)
async def health(request: Request) -> Response:
    """200 whenever this process answers; `reason` is /ready's."""
    front = frontend_of(request)
    return JSONResponse({"status": "ok", "epoch": front.engine.epoch, "reason": front.unready_reason()})


@router.head("/ping", include_in_schema=False)
@router.get("/ping", response_model=HealthResponse)
async def ping(request: Request) -> Response:
    """/health, by the name that vLLM and SageMaker have for it."""
    return await health(request)


@router.post("/ping", response_model=HealthResponse)
async def post_ping(request: Request) -> Response:
    """The same; a body is not looked at."""
    return await health(request)


@router.head("/version", include_in_schema=False)
@router.get("/version", response_model=VersionResponse, responses=error_responses(401))
async def version(request: Request) -> Response:
    """The version of this package."""
    return JSONResponse({"version": request.app.version})


@router.head("/ready", include_in_schema=False)
@router.get(
    "/ready", response_model=HealthResponse, responses={503: {"model": HealthResponse, "description": "Not ready, and why"}}
)
async def ready(request: Request) -> Response:
    """200 when requests are served now; 503 with the reason during load, recovery, drain, or when a rank does not move."""
    front = frontend_of(request)
    reason = front.unready_reason()
    body = {"status": "ready" if reason is None else "not ready", "epoch": front.engine.epoch, "reason": reason}
    return JSONResponse(body, 200 if reason is None else 503, headers=None if reason is None else {"Retry-After": "5"})
