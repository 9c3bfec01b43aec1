"""Requests with and without images, handed to a running head at chosen moments, and when each got its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ep_runtime.bench.session import MeasuredLLM
from ep_runtime.bench.vision_encoder import Size
from ep_runtime.engine.vision.inputs import vision_input
from model.spec import VisionSpec
from protocol.messages import Abort, Results, SamplingParams, Submit, VisionInput

LEAD, TAIL = 16, 8
"""Text tokens before and behind an image."""

PATIENCE_SECONDS = 120.0
"""For anything that is waited for: a head that makes no progress ends the benchmark."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt and its images, all made before the clock runs."""

    prompt: list[int]
    images: list[VisionInput] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Track:
    """One request on its way: `perf_counter` of its submission, of each token, and of its end."""

    name: str
    submitted: float
    stamps: list[float] = field(default_factory=list)
    ended: float | None = None

    @property
    def first_ms(self) -> float:
        """Milliseconds from its submission to its first token."""
        return 1e3 * (self.stamps[0] - self.submitted)


class Maker:
    """Makes prompts that nobody has seen: random text without placeholders, random images."""

    def __init__(self, spec: VisionSpec, vocab_size: int, seed: int = 0) -> None:
        self._spec = spec
        self._random = np.random.default_rng(seed)
        self._text = np.setdiff1d(np.arange(vocab_size), spec.placeholders)

    def text(self, tokens: int) -> Request:
        """Of so many tokens."""
        return Request(prompt=self._tokens(tokens))

    def image(self, size: Size) -> Request:
        """An image between some text."""
        width, height = size
        pixels = self._random.integers(0, 256, (1, height, width, 3), dtype=np.uint8)
        return self._around(vision_input(LEAD, pixels, self._spec))

    def again(self, request: Request) -> Request:
        """The same image between other text, so that no beginning of the prompt is known."""
        return self._around(request.images[0])

    def _around(self, image: VisionInput) -> Request:
        prompt = [*self._tokens(LEAD), *[self._spec.placeholders[0]] * image.rows, *self._tokens(TAIL)]
        return Request(prompt=prompt, images=[image])

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._random.choice(self._text, count).tolist()
        return tokens


class Traffic:
    """Drives the head of a measured `LLM`. Errors of requests end the benchmark."""

    def __init__(self, llm: MeasuredLLM) -> None:
        self._llm = llm
        self._tracks: dict[str, Track] = {}
        self._fault: str | None = None
        self._count = 0
        llm.on_results = self._take

    def submit(self, request: Request, new_tokens: int) -> Track:
        """Hand over a request that gets exactly so many tokens, greedily."""
        name = f"traffic-{self._count}"
        self._count += 1
        sampling = SamplingParams(seed=0, max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        message = Submit(request_id=name, group=name, prompt=request.prompt, sampling=sampling, images=request.images)
        track = self._tracks[name] = Track(name=name, submitted=time.perf_counter())
        self._llm.submit(message)
        return track

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Turn the head. RuntimeError for a request that failed, or when it takes too long."""
        began = time.perf_counter()
        while not reached():
            self._llm.head.turn(idle_wait_s=0.0)
            if self._fault is not None:
                raise RuntimeError(self._fault)
            if time.perf_counter() - began > PATIENCE_SECONDS:
                raise RuntimeError(f"nothing came of {len(self._tracks)} requests in {PATIENCE_SECONDS:g} s")

    def finish(self, tracks: Sequence[Track]) -> None:
        """Until all of these have ended."""
        self.run_until(lambda: all(track.ended is not None for track in tracks))

    def abort(self, tracks: Sequence[Track]) -> None:
        """End these before their time."""
        self._llm.submit(Abort([track.name for track in tracks]))
        self.finish(tracks)

    def _take(self, results: Results) -> None:
        now = time.perf_counter()
        for update in results.updates:
            track = self._tracks.get(update.request_id)
            if track is None:
                continue
            track.stamps += [now] * len(update.tokens)
            if update.finish is not None:
                track.ended = now
                del self._tracks[update.request_id]
                if update.finish == "error":
                    self._fault = f"{update.request_id}: {update.error}"
