"""What every endpoint works with, and the door that a generation request passes."""

from __future__ import annotations

import time

from fastapi import Request

from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.config import FrontendConfig
from ep_runtime.frontend.engine_client import EngineClient
from ep_runtime.frontend.generation import Generation
from ep_runtime.frontend.journal import Journal
from ep_runtime.frontend.metrics import Metrics
from ep_runtime.frontend.readiness import Phase, unready_reason
from ep_runtime.frontend.text_stack import TextStack
from protocol.messages import EpochReady


class Frontend:
    """The process's parts, made once in main and passed down. `draining` is set by SIGTERM."""

    def __init__(self, config: FrontendConfig, text: TextStack, journal: Journal, engine: EngineClient, metrics: Metrics) -> None:
        self.config = config
        self.text = text
        self.journal = journal
        self.engine = engine
        self.metrics = metrics
        self.draining = False
        self.started = int(time.time())

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.config.served_model_name[0]

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 400 unless `name` is served."""
        if name is not None and name not in self.config.served_model_name:
            served = ", ".join(self.config.served_model_name)
            raise ApiError(
                400, f"The model {name[:200]!r} is not served; this server has: {served}", param="model", code="model_not_found"
            )

    def open_engine(self) -> EpochReady:
        """What is known of the model. Raises ApiError 503 while draining, before the first epoch, and after the last."""
        if self.draining:
            raise ApiError(503, "The server is shutting down", code="draining", retry_after=5)
        health = self.engine.health
        if health.phase is Phase.FAILED:
            raise ApiError(503, f"The engine has stopped: {health.reason}", code="not_ready", retry_after=30)
        if self.engine.info is None:
            raise ApiError(503, f"The model is not ready: {health.reason}", code="not_ready", retry_after=5)
        return self.engine.info

    def admit(self, info: EpochReady, sequences: int) -> None:
        """Raise ApiError 429 when so many more sequences would overfill the queue, 400 when they never fit."""
        bound = info.max_num_seqs + self.config.max_queue
        if sequences > bound:
            raise ApiError(400, f"The request asks for {sequences} sequences; the server holds at most {bound}", param="n")
        if len(self.journal) + sequences > bound:
            raise ApiError(429, f"The queue is full ({len(self.journal)} sequences)", code="queue_full", retry_after=1)

    def generation(self, stream: bool) -> Generation:
        """A new request's fan-in."""
        limit = self.config.stream_buffer_bytes if stream else self.config.answer_bytes
        return Generation(self.engine, self.metrics, stream=stream, limit=limit)

    def unready_reason(self) -> str | None:
        """Why /ready says 503; None when it says 200."""
        return unready_reason(self.engine.health, self.draining, time.monotonic(), self.config.ready_bound_seconds)


def frontend_of(request: Request) -> Frontend:
    """The Frontend of the app that serves this request."""
    front = request.app.state.frontend
    assert isinstance(front, Frontend)
    return front
