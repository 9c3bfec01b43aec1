"""/v1/models: the names under which the one model is served."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from ep_runtime.frontend.api.errors import ApiError, error_responses
from ep_runtime.frontend.context import Frontend, frontend_of

router = APIRouter(tags=["models"])


class ModelCard(BaseModel):
    """One served name. `max_model_len` and `input_modalities` (`text`, `image`, `video`) are null until an engine has reported.

    `max_loops` is there for a looped model: the most that a request may ask for.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    input_modalities: list[str] | None
    max_loops: int | None = None


class ModelList(BaseModel):
    """All served names."""

    object: Literal["list"]
    data: list[ModelCard]


def model_card(front: Frontend, name: str) -> dict[str, Any]:
    """A ModelCard as plain data."""
    info = front.engine.info
    card = {
        "id": name,
        "object": "model",
        "created": front.started,
        "owned_by": "ep_runtime",
        "max_model_len": None if info is None else info.max_model_len,
        "input_modalities": None if info is None else front.inputs(info),
    }
    if info is not None and info.max_loops > 1:
        card["max_loops"] = info.max_loops
    return card


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", response_model=ModelList, responses=error_responses(401))
async def list_models(request: Request) -> Response:
    """The served names."""
    front = frontend_of(request)
    return JSONResponse({"object": "list", "data": [model_card(front, name) for name in front.config.served_model_name]})


@router.head("/v1/models/{model:path}", include_in_schema=False)
@router.get("/v1/models/{model:path}", response_model=ModelCard, responses=error_responses(401, 404))
async def get_model(request: Request, model: str) -> Response:
    """One of them."""
    front = frontend_of(request)
    if model not in front.config.served_model_name:
        raise ApiError(404, f"The model {model[:200]!r} does not exist", param="model", code="model_not_found")
    return JSONResponse(model_card(front, model))
