"""The frontend's dealings with the engines: epochs, submission, replay, and one fan-out of each step's results.

The engine of an epoch announces itself by EpochReady, again and again; the coordinator tells of an epoch's end, as often as it has
learnt more of it. What carries another epoch than the running one is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable

from ep_runtime.frontend.api.errors import ApiError, stopped
from ep_runtime.frontend.journal import Entry, Journal, Sink, ended_unseen
from ep_runtime.frontend.link import Link
from ep_runtime.frontend.metrics import Metrics
from ep_runtime.frontend.readiness import EngineHealth, Phase
from ep_runtime.frontend.replay import ReplayClock
from protocol.codec import decode
from protocol.errors import EpFrameCorrupt
from protocol.messages import (
    Abort,
    EngineStats,
    EpochEnded,
    EpochReady,
    Mask,
    Recovered,
    Results,
    Submit,
    Takeover,
    ToFrontend,
)

log = logging.getLogger(__name__)


class EngineClient:
    """Owns the current epoch and the journal's dealings with it. All methods run on the event loop's thread.

    `prefix` begins the request ids of this process, by which an engine tells them from those of an earlier one. `heard` is set once
    anything is known of an engine, `first_ready` once there was an epoch.
    """

    def __init__(self, link: Link, journal: Journal, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.health = EngineHealth()
        self.info: EpochReady | None = None
        self.stats: EngineStats | None = None
        self.heard = asyncio.Event()
        self.first_ready = asyncio.Event()
        self.prefix = f"{secrets.token_hex(4)}-"
        self._link = link
        self._journal = journal
        self._metrics = metrics
        self._clock = clock
        self._epoch: int | None = None
        self._newest = -1
        self._leaving: set[str] = set()
        self._replay = ReplayClock(clock, metrics.observe_replay)

    @property
    def epoch(self) -> int | None:
        """The running epoch; None while there is none."""
        return self._epoch

    @property
    def held(self) -> int:
        """Sequences that take room: the unfinished, and those ended here of which the engine has yet to say so."""
        return len(self._journal) + len(self._leaving)

    async def run(self) -> None:
        """Receive for ever. A message that does not decode is refused whole, logged and counted."""
        while True:
            data = await self._link.receive()
            try:
                message = decode(ToFrontend, data)
            except EpFrameCorrupt as error:
                log.error("refused a message of the engine: %s", error)
                self._metrics.dropped.labels("malformed").inc()
                continue
            self._handle(message)
            # A receive that finds a message does not yield: streams must be written between two steps of a backlog.
            await asyncio.sleep(0)

    def close(self) -> None:
        """Close the sockets; unsent messages are dropped."""
        self._epoch = None
        self._link.close()

    # What requests do

    def submit(self, pairs: list[tuple[Submit, Sink]]) -> None:
        """Journal new sequences and send them, or keep them for the next epoch when none runs."""
        for submit, sink in pairs:
            self._start(self._journal.add(submit, sink))

    def abort(self, request_ids: Iterable[str]) -> list[Entry]:
        """End sequences from this side, at once; returns those that were unfinished."""
        gone = self._journal.withdraw(request_ids)
        sent = [entry.request_id for entry in gone if self._epoch is not None and entry.sent_epoch == self._epoch]
        if sent:
            # They count until the engine has answered: else requests that come and go could fill an engine's inbox without end.
            self._leaving.update(sent)
            self._link.send(Abort(request_ids=sent))
        for entry in gone:
            self._replay.settle(entry.request_id)
        return gone

    def set_mask(self, request_id: str, index: int, mask: bytes) -> None:
        """Give the grammar's mask for generated token `index`. Starts a sequence whose replay waited for it."""
        entry = self._journal.get(request_id)
        if entry is None or index != len(entry.tokens):
            return
        entry.mask, entry.mask_index = mask, index
        if self._epoch is None:
            return
        if entry.sent_epoch == self._epoch:
            self._link.send(Mask(request_id=request_id, index=index, mask=mask))
        else:
            self._start(entry)

    def fail_all(self, error: ApiError) -> None:
        """Give every unfinished sequence a terminal error; the engine, if one runs, is told to stop them."""
        self._fail([entry.request_id for entry in self._journal.unfinished()], error)

    def _start(self, entry: Entry) -> None:
        if self._epoch is None or entry.mask_due:
            return
        entry.epochs.append(self._epoch)
        self._link.send(entry.replay())

    def _fail(self, request_ids: list[str], error: ApiError) -> None:
        for entry in self.abort(request_ids):
            entry.sink.fail(error)

    # What is received

    def _handle(self, message: ToFrontend) -> None:
        match message:
            case Results():
                self._take_results(message)
            case EpochReady():
                self._begin(message)
            case EpochEnded():
                self._end(message)
            case Recovered():
                self._metrics.observe_recovery(message.seconds)

    def _take_results(self, results: Results) -> None:
        if results.epoch != self._epoch:
            self._metrics.dropped.labels("epoch").inc()
            return
        self.stats = results.stats
        self.health.observe(results.stats.ranks, self._clock())
        tokens = 0
        for update in results.updates:
            entry = self._journal.record(update)
            if entry is None:
                self._metrics.dropped.labels("ended").inc()
                if update.finish is not None:
                    self._leaving.discard(update.request_id)
                continue
            tokens += len(update.tokens)
            self._metrics.observe_loops(len(update.tokens), update.depths)
            if update.tokens or update.finish is not None:
                self._replay.settle(update.request_id)
            entry.sink.deliver(update)
        self._metrics.generated_tokens.inc(tokens)

    def _begin(self, ready: EpochReady) -> None:
        if ready.epoch == self._epoch:
            return  # said again, for a frontend that may have started later
        if ready.epoch <= self._newest:
            self._metrics.dropped.labels("epoch").inc()
            log.info("epoch %d is announced after the end of epoch %d", ready.epoch, self._newest)
            return
        first = self.info is None
        self._leave()
        self._epoch = self._newest = ready.epoch
        self.info = ready
        if ready.max_loops > 1:
            self._metrics.serve_loops(ready.max_loops)
        self.health = EngineHealth.running(ready.world, self._clock())
        self._metrics.epoch.set(ready.epoch)
        self._link.connect(ready.epoch)
        self._link.send(Takeover(prefix=self.prefix))
        again = self._submit_again(ready)
        if not first:
            self._replay.begin(again)
        self.heard.set()
        self.first_ready.set()

    def _submit_again(self, ready: EpochReady) -> list[str]:
        """Send every unfinished sequence in order of arrival; the ids of those that were in an epoch before.

        One whose next mask is still being computed follows as soon as that is there: nobody waits for somebody's grammar.
        """
        again = []
        for entry in self._journal.unfinished():
            if self._journal.get(entry.request_id) is None:
                continue  # ended meanwhile, with a sample of the same request
            ended = ended_unseen(entry, ready.stop_token_ids)
            if ended is not None:
                self._journal.record(ended)
                entry.sink.deliver(ended)
                continue
            if entry.epochs:
                again.append(entry.request_id)
                self._metrics.replayed_sequences.inc()
                self._metrics.replayed_tokens.inc(len(entry.submit.prompt) + len(entry.tokens))
            self._start(entry)
        return again

    def _end(self, ended: EpochEnded) -> None:
        if ended.suspicious:
            self._suspect(ended)
        if ended.epoch < self._newest:
            # More is known of an epoch that was over: this one goes on.
            return
        self._newest = ended.epoch
        if self._epoch is not None:
            self._metrics.epochs_ended.inc()
        self._leave()
        phase = Phase.FAILED if ended.final else (Phase.STARTING if self.info is None else Phase.RECOVERING)
        self.health = EngineHealth(phase=phase, reason=ended.reason)
        self.heard.set()
        log.warning("epoch %d ended (%s): %s", ended.epoch, "for good" if ended.final else "to be continued", ended.reason)
        if ended.final:
            self.fail_all(stopped(ended.reason))

    def _suspect(self, ended: EpochEnded) -> None:
        """Sequences that were in this epoch may have ended it; one that ran alone did, and gets the error."""
        for entry in self._journal.unfinished():
            entry.suspect(ended.epoch)
        alone = self._journal.get(ended.alone)
        if alone is not None and ended.epoch in alone.epochs:
            reason = f"The engine failed while it was running this request alone, so the request is given up: {ended.reason}"
            self._fail([alone.request_id], ApiError(500, reason, code="engine_error"))

    def _leave(self) -> None:
        """No engine runs: nothing that it was asked or has told holds any more."""
        self._epoch = None
        self.stats = None
        self._leaving.clear()
        self._replay.cancel()
        self._link.disconnect()
