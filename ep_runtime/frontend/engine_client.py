"""The frontend's end of the ZeroMQ link: epochs, submission, replay, and one fan-out of each step's results.

The frontend binds `ipc://DIR/frontend` (PULL) for its whole life. The engine of epoch N binds `ipc://DIR/engine-N` (PULL), connects
to the former and announces itself by EpochReady. What carries another epoch than the current one is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

from ep_runtime.frontend.journal import Entry, Journal, Sink, ended_unseen
from ep_runtime.frontend.metrics import Metrics
from ep_runtime.frontend.readiness import EngineHealth, Phase
from protocol.codec import decode, encode
from protocol.errors import EpFrameCorrupt
from protocol.messages import (
    Abort,
    EngineStats,
    EpochEnded,
    EpochReady,
    Mask,
    Results,
    SequenceUpdate,
    Submit,
    ToEngine,
    ToFrontend,
)

log = logging.getLogger(__name__)


class EngineClient:
    """Owns the sockets, the current epoch and the journal's dealings with it. All methods run on the event loop's thread."""

    def __init__(
        self, runtime_dir: str | Path, journal: Journal, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.health = EngineHealth()
        self.info: EpochReady | None = None
        self.stats: EngineStats | None = None
        self.first_ready = asyncio.Event()
        self._dir = Path(runtime_dir)
        self._journal = journal
        self._metrics = metrics
        self._clock = clock
        self._epoch: int | None = None
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set(zmq.RCVHWM, 0)
        self._inbox.bind(f"ipc://{self._dir}/frontend")
        self._outbox: zmq.Socket[bytes] | None = None

    @property
    def epoch(self) -> int | None:
        """The running epoch; None while there is none."""
        return self._epoch

    async def run(self) -> None:
        """Receive for ever. A message that does not decode is refused whole, logged and counted."""
        while True:
            data = await self._inbox.recv()
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
        self._disconnect()
        self._inbox.close(linger=0)
        self._context.term()

    def submit(self, pairs: list[tuple[Submit, Sink]]) -> None:
        """Journal new sequences and send them, or keep them for the next epoch when none runs."""
        for submit, sink in pairs:
            self._start(self._journal.add(submit, sink))

    def abort(self, request_ids: list[str]) -> list[Entry]:
        """End sequences from this side, at once; returns those that were unfinished."""
        gone = self._journal.withdraw(request_ids)
        sent = [entry.submit.request_id for entry in gone if entry.sent_epoch is not None and entry.sent_epoch == self._epoch]
        if sent:
            self._send(Abort(request_ids=sent))
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
            self._send(Mask(request_id=request_id, index=index, mask=mask))
        else:
            self._start(entry)

    def _start(self, entry: Entry) -> None:
        if self._epoch is None or entry.mask_due:
            return
        entry.sent_epoch = self._epoch
        self._send(entry.replay())

    def _send(self, message: ToEngine) -> None:
        # No high-water mark on this socket: the journal's bound bounds what can wait here, so a send never blocks the loop.
        assert self._outbox is not None
        self._outbox.send(encode(message), zmq.NOBLOCK)

    def _handle(self, message: ToFrontend) -> None:
        match message:
            case Results():
                self._take_results(message)
            case EpochReady():
                self._begin(message)
            case EpochEnded():
                self._end(message)

    def _take_results(self, results: Results) -> None:
        if results.epoch != self._epoch:
            self._metrics.dropped.labels("epoch").inc()
            return
        self.stats = results.stats
        self.health.observe(results.stats, self._clock())
        tokens, unknown = 0, []
        for update in results.updates:
            entry = self._journal.record(update)
            if entry is not None:
                tokens += len(update.tokens)
                entry.sink.deliver(update)
                continue
            self._metrics.dropped.labels("ended").inc()
            if update.finish is None:
                unknown.append(update.request_id)
        self._metrics.generated_tokens.inc(tokens)
        if unknown:
            # Sequences of a frontend that was here before, or whose abort is still on its way: once more does no harm.
            self._send(Abort(request_ids=unknown))

    def _begin(self, ready: EpochReady) -> None:
        if ready.epoch == self._epoch:
            return  # said again, for a frontend that may have started later
        if self.info is not None and ready.epoch <= self.info.epoch:
            self._metrics.dropped.labels("epoch").inc()
            log.error("epoch %d announced after epoch %d", ready.epoch, self.info.epoch)
            return
        self._disconnect()
        self._outbox = zmq.Socket(zmq.Context(self._context), zmq.PUSH)
        self._outbox.set(zmq.SNDHWM, 0)
        self._outbox.connect(f"ipc://{self._dir}/engine-{ready.epoch}")
        self._epoch, self.info, self.stats = ready.epoch, ready, None
        self.health = EngineHealth(phase=Phase.READY, reason="", heard=self._clock())
        self._metrics.epoch.set(ready.epoch)
        self._replay(ready)
        self.first_ready.set()

    def _replay(self, ready: EpochReady) -> None:
        for entry in self._journal.unfinished():
            ended = ended_unseen(entry, ready.stop_token_ids)
            if ended is not None:
                self._journal.record(ended)
                entry.sink.deliver(ended)
                continue
            if entry.sent_epoch is not None:
                self._metrics.replayed_sequences.inc()
                self._metrics.replayed_tokens.inc(len(entry.submit.prompt) + len(entry.tokens))
            self._start(entry)

    def _end(self, ended: EpochEnded) -> None:
        # The end of an epoch that never became ready is told too; only what an older epoch says is stale.
        if self.info is not None and ended.epoch < self.info.epoch:
            self._metrics.dropped.labels("epoch").inc()
            return
        if self._epoch is not None:
            self._metrics.epochs_ended.inc()
        self._disconnect()
        phase = Phase.FAILED if ended.final else (Phase.STARTING if self.info is None else Phase.RECOVERING)
        self.health = EngineHealth(phase=phase, reason=ended.reason, heard=self._clock())
        log.warning("epoch %d ended (%s): %s", ended.epoch, "for good" if ended.final else "to be continued", ended.reason)
        if ended.final:
            self.fail_all(503, f"the engine has stopped: {ended.reason}")

    def fail_all(self, status: int, reason: str) -> None:
        """Give every unfinished sequence a terminal error; the engine, if one runs, is told to stop them."""
        for entry in self.abort([entry.submit.request_id for entry in self._journal.unfinished()]):
            request_id = entry.submit.request_id
            entry.sink.deliver(SequenceUpdate(request_id=request_id, tokens=[], finish="error", error=reason, status=status))

    def _disconnect(self) -> None:
        self._epoch = None
        if self._outbox is not None:
            self._outbox.close(linger=0)
            self._outbox = None
