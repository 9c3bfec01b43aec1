"""The FastAPI application: routes, middleware, error format, and an OpenAPI document that says what is really answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ep_runtime.frontend.api import chat, completions, health, metrics, models, tokenize
from ep_runtime.frontend.api.errors import install_error_handlers
from ep_runtime.frontend.context import Frontend
from ep_runtime.frontend.guard import OPEN_PATHS, Guard

ROUTERS = (chat.router, completions.router, models.router, tokenize.router, health.router, metrics.router)


IMAGE_PATHS = ("/v1/chat/completions", "/tokenize")
"""Where images may be in the body."""


def build_app(front: Frontend, version: str) -> FastAPI:
    """The application over one Frontend."""
    config = front.config
    larger = max(config.max_request_bytes, config.max_image_request_bytes)
    app = FastAPI(
        title="ep_runtime",
        version=version,
        root_path=config.root_path,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.frontend = front
    for router in ROUTERS:
        app.include_router(router)
    install_error_handlers(app)
    app.add_middleware(
        Guard,
        api_keys=config.api_keys,
        max_bytes=config.max_request_bytes,
        max_held=config.max_held_bytes,
        body_seconds=config.body_seconds,
        larger={} if front.text.vision is None else dict.fromkeys(IMAGE_PATHS, larger),
    )
    document = app.openapi
    app.openapi = lambda: correct_document(document(), bool(config.api_keys))  # type: ignore[method-assign]
    return app


def open_to(origins: Sequence[str], app: ASGIApp) -> ASGIApp:
    """`app` with leave for browsers that show pages of these origins to call it and read its answers; `*` is any.

    Around everything else, the framework's own answer to an error of ours included: pages may read every refusal, and a preflight,
    which browsers send without a key, needs none.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After"],  # which OpenAI's client reads
    )


def correct_document(document: dict[str, Any], keyed: bool) -> dict[str, Any]:
    """The framework declares a 422 that this server never answers; and says nothing of the API key."""
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if not keyed:
                operation["responses"].pop("401", None)
            elif path not in OPEN_PATHS:
                operation["security"] = [{"api_key": []}]
    components = document.setdefault("components", {})
    for name in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(name, None)
    if keyed:
        components["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
    return document
