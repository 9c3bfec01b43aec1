"""What every endpoint works with, and the door that a generation request passes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastapi import Request

from ep_runtime.frontend.api.errors import ApiError, shutting_down, stopped
from ep_runtime.frontend.config import FrontendConfig
from ep_runtime.frontend.engine_client import EngineClient
from ep_runtime.frontend.generation import Generation
from ep_runtime.frontend.journal import Journal
from ep_runtime.frontend.loops import LoopFields, LoopsRefused, choose_loops
from ep_runtime.frontend.metrics import Metrics
from ep_runtime.frontend.readiness import Phase, unready_reason
from ep_runtime.frontend.text_stack import TextStack
from ep_runtime.frontend.vision.decoders import Decoders
from ep_runtime.frontend.vision.fetching import Fetcher, FetchPolicy
from ep_runtime.frontend.vision.hosts import parse_hosts
from ep_runtime.frontend.vision.loader import MediaLoader
from ep_runtime.frontend.vision.memory import ImageMemory
from ep_runtime.frontend.vision.settings import VisionSettings
from protocol.commands import Loops
from protocol.messages import EpochReady

FIRST_WORD_S = 2.0
"""A running head announces itself once a second: after this time, a process that has heard of none knows that there is none."""


class Frontend:
    """The process's parts, made once in main and passed down. `draining` is set by SIGTERM.

    `media` is None for a model that takes text alone; without one given it is made from the configuration.
    """

    def __init__(
        self,
        config: FrontendConfig,
        text: TextStack,
        journal: Journal,
        engine: EngineClient,
        metrics: Metrics,
        media: MediaLoader | None = None,
    ) -> None:
        self.config = config
        self.text = text
        self.journal = journal
        self.engine = engine
        self.metrics = metrics
        self.media = media if media is not None or text.vision is None else make_loader(config, text.vision)
        self.image_memory = ImageMemory(config.image_memory_bytes, lambda: journal.image_bytes)
        # One thread: several would keep the event loop from its turns.
        self.large_bodies = ThreadPoolExecutor(1, thread_name_prefix="large-body")
        self.draining = False
        self.started = int(time.time())
        self._preparing = 0
        self._hear_by = time.monotonic() + FIRST_WORD_S

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.config.served_model_name[0]

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404, as OpenAI does, unless `name` is served; an empty one is none, as for vLLM."""
        if name and name not in self.config.served_model_name:
            served = ", ".join(self.config.served_model_name)
            raise ApiError(
                404, f"The model {name[:200]!r} is not served; this server has: {served}", param="model", code="model_not_found"
            )

    def inputs(self, info: EpochReady) -> list[str]:
        """What the model takes and this process can prepare, `text` first."""
        ours = {"text"}
        if self.media is not None:
            ours |= {"image"} if self.media.settings.video is None else {"image", "video"}
        return [name for name in info.inputs if name in ours]

    def loops(self, asked: LoopFields, info: EpochReady) -> Loops | None:
        """How many loops a request's tokens may run, None for one. Raises ApiError 400 for what the model cannot do."""
        try:
            return choose_loops(asked, self.config, info.max_loops)
        except LoopsRefused as error:
            raise ApiError(400, str(error), param=error.param) from None

    async def reach_engine(self) -> EpochReady:
        """`open_engine` for a request that has just come: a process that has just started waits for word of an engine first."""
        left = self._hear_by - time.monotonic()
        if left > 0 and not self.draining:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.engine.heard.wait()
        return self.open_engine()

    def open_engine(self) -> EpochReady:
        """What is known of the model. Raises ApiError 503 while draining, before the first epoch, and after the last."""
        if self.draining:
            raise shutting_down()
        health = self.engine.health
        if health.phase is Phase.FAILED:
            raise stopped(health.reason)
        if self.engine.info is None:
            raise ApiError(503, f"The model is not ready: {health.reason}", code="not_ready", retry_after=5)
        return self.engine.info

    def admit(self, info: EpochReady, sequences: int) -> None:
        """Raise ApiError 429 when so many more sequences would overfill the queue, 400 when they never fit."""
        bound = info.max_num_seqs + self.config.max_queue
        if sequences > bound:
            raise ApiError(400, f"The request asks for {sequences} sequences; the server holds at most {bound}", param="n")
        held = self.engine.held + self._preparing
        if held + sequences > bound:
            raise ApiError(429, f"The queue is full ({held} sequences)", code="queue_full", retry_after=1)

    @contextlib.contextmanager
    def preparing(self, info: EpochReady, sequences: int) -> Iterator[None]:
        """`admit`, and a place in the queue while these sequences' prompt is rendered and tokenized.

        What will be refused is refused before it costs anything, also when very many come at once. The place ends with the block:
        whoever then starts the sequences without a pause finds it free.
        """
        self.admit(info, sequences)
        self._preparing += sequences
        try:
            yield
        finally:
            self._preparing -= sequences

    def close(self) -> None:
        """End the processes and the thread that this one started."""
        self.large_bodies.shutdown(wait=False, cancel_futures=True)
        if self.media is not None:
            self.media.close()

    def generation(self, stream: bool) -> Generation:
        """A new request's fan-in."""
        limit = self.config.stream_buffer_bytes if stream else self.config.answer_bytes
        return Generation(self.engine, self.metrics, stream=stream, limit=limit)

    def unready_reason(self) -> str | None:
        """Why /ready says 503; None when it says 200."""
        return unready_reason(self.engine.health, self.draining, time.monotonic(), self.config.ready_bound_seconds)


def make_loader(config: FrontendConfig, settings: VisionSettings) -> MediaLoader:
    """The loader of images and videos, as configured; its processes start with the first image."""
    policy = FetchPolicy(hosts=parse_hosts(config.image_url_hosts), most=config.max_image_bytes, seconds=config.image_url_seconds)
    decoders = Decoders(count=config.decoders, seconds=config.decode_seconds, memory_bytes=config.decoder_memory_bytes)
    folder = None if config.image_dir is None else Path(config.image_dir)
    return MediaLoader(settings, Fetcher(policy), decoders, folder=folder, most=config.max_image_bytes)


def frontend_of(request: Request) -> Frontend:
    """The Frontend of the app that serves this request."""
    front = request.app.state.frontend
    assert isinstance(front, Frontend)
    return front
