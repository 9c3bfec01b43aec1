"""One HTTP request's sequences: their updates fan in here, their deltas wait here, and whatever ends the request ends them all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.choice import Choice, ChoiceDelta
from ep_runtime.frontend.engine_client import EngineClient
from ep_runtime.frontend.grammar_driver import GrammarDriver
from ep_runtime.frontend.journal import Sink
from ep_runtime.frontend.metrics import Metrics
from protocol.messages import SequenceUpdate, Submit

log = logging.getLogger(__name__)


class Sequence:
    """The sink of one sequence: runs its choice and its grammar, and hands the delta to the generation."""

    def __init__(self, owner: Generation, request_id: str, choice: Choice, grammar: GrammarDriver | None) -> None:
        self.request_id = request_id
        self.choice = choice
        self.grammar = grammar
        self._owner = owner
        self._first = 0.0
        self._last = 0.0

    def deliver(self, update: SequenceUpdate) -> None:
        """Never raises: an error in parsing this sequence's text is this request's alone."""
        if self.choice.finish is not None or self._owner.failure is not None:
            return
        if update.finish in ("error", "abort"):
            self._owner.fail(engine_error(update))
            return
        try:
            delta = self.choice.push(update)
        except Exception:
            log.exception("output of %s could not be processed", self.request_id)
            self._owner.fail(ApiError(500, "The output could not be processed", code="output_error"))
            return
        if update.tokens:
            self._observe()
        self._owner.accept(self, delta, ended_here=update.finish is None and self.choice.finish is not None)
        if self.grammar is not None and self.choice.finish is None and update.tokens:
            self.grammar.advance(update.tokens, self.choice.generated)

    def fail(self, error: ApiError) -> None:
        """The sequence is given up, and its request with it."""
        if self.choice.finish is None:
            self._owner.fail(error)

    def _observe(self) -> None:
        metrics, now = self._owner.metrics, self._owner.clock()
        if self._first == 0.0:
            self._first = now
            metrics.first_token.observe(now - self._owner.started)
            metrics.cached_tokens.inc(self.choice.cached or 0)
        else:
            metrics.inter_token.observe(now - self._last)
        self._last = now

    def observe_end(self) -> None:
        """Record the whole sequence's pace."""
        if self.choice.generated > 1:
            self._owner.metrics.per_output_token.observe((self._last - self._first) / (self.choice.generated - 1))


def engine_error(update: SequenceUpdate) -> ApiError:
    """The HTTP error of a terminal update that is no success."""
    if update.finish == "abort":
        return ApiError(503, update.error or "The engine gave this request up", code="aborted", retry_after=1)
    status = update.status if 400 <= update.status < 600 else 500
    retry_after = update.retry_after if update.retry_after is not None else (1.0 if status in (429, 503) else None)
    code = {429: "queue_full", 503: "not_ready"}.get(status, "engine_error")
    return ApiError(status, update.error or "The engine failed this request", code=code, retry_after=retry_after)


class Generation:
    """Choices of one request, in the order of their sequences. `take()` gives their deltas as they come.

    `limit` bounds what a stream may leave unread, or what a whole answer may hold, in bytes.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        *,
        stream: bool,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics
        self.clock = clock
        self.started = clock()
        self.failure: ApiError | None = None
        self.overflow = asyncio.Event()
        self.sequences: list[Sequence] = []
        self._engine = engine
        self._stream = stream
        self._limit = limit
        self._held = 0
        self._deltas: list[ChoiceDelta] = []
        self._wake = asyncio.Event()
        self._open = 0

    @property
    def finished(self) -> bool:
        """True when every sequence has ended by itself."""
        return all(sequence.choice.finish is not None for sequence in self.sequences)

    def start(self, submits: list[Submit], choices: list[Choice], grammars: list[GrammarDriver | None]) -> None:
        """Journal and send every sequence, as one group."""
        pairs: list[tuple[Submit, Sink]] = []
        for submit, choice, grammar in zip(submits, choices, grammars, strict=True):
            sequence = Sequence(self, submit.request_id, choice, grammar)
            if grammar is not None:
                grammar.attach(self, submit.request_id)
            self.sequences.append(sequence)
            pairs.append((submit, sequence))
            self.metrics.prompt_tokens.inc(len(submit.prompt))
        self._open = len(pairs)
        self._engine.submit(pairs)

    async def take(self) -> list[ChoiceDelta]:
        """The deltas that have come since the last call, at least one; none after the last. Raises the ApiError that ended it."""
        while True:
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                if self._stream:
                    self._held = 0
                return deltas
            if self.failure is not None:
                raise self.failure
            if self._open == 0:
                return []
            self._wake.clear()
            await self._wake.wait()

    def accept(self, sequence: Sequence, delta: ChoiceDelta, ended_here: bool) -> None:
        """Queue a delta. `ended_here`: a stop string ended the sequence, which the engine does not know yet."""
        self._deltas.append(delta)
        self._held += delta.cost()
        if delta.finish is not None:
            self._open -= 1
            sequence.observe_end()
            self.metrics.sequences.labels(delta.finish).inc()
            if ended_here:
                self._engine.abort([sequence.request_id])
        self._wake.set()
        if self._held > self._limit:
            self._refuse_more()

    def _refuse_more(self) -> None:
        if self._stream:
            self.overflow.set()
            self.fail(ApiError(503, "The client reads too slowly", code="slow_reader"))
            return
        text = f"The answer is larger than {self._limit} bytes; stream it, or ask for fewer samples, tokens or logprobs"
        self.fail(ApiError(400, text, code="answer_too_large"))

    def give_mask(self, request_id: str, index: int, mask: bytes) -> None:
        """Pass a grammar's mask on."""
        self._engine.set_mask(request_id, index, mask)

    def fail(self, error: ApiError) -> None:
        """End the whole request with an error; the first one counts."""
        if self.failure is None:
            self.failure = error
            self._end("error")

    def cancel(self) -> None:
        """The client has all it wants, or is gone: end what is unfinished. May be called any number of times."""
        self._end("abort")

    def _end(self, outcome: str) -> None:
        unfinished = [sequence for sequence in self.sequences if sequence.choice.finish is None]
        if self._open:
            self._open = 0
            self.metrics.sequences.labels(outcome).inc(len(unfinished))
            self._engine.abort([sequence.request_id for sequence in unfinished])
        for sequence in self.sequences:
            if sequence.grammar is not None:
                sequence.grammar.close()
        self._wake.set()
