"""One rank's supervisor: joins, keeps the rank's engine, and carries messages between it and the coordinator."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path

from ep_runtime.config import RuntimeConfig, localise
from ep_runtime.supervise.coordinator import package_version
from ep_runtime.supervise.engine_keeper import EngineKeeper, Job
from ep_runtime.supervise.engine_process import Death, EngineState, Post
from ep_runtime.supervise.folder import clear_epochs
from ep_runtime.supervise.head_link import HeadLink
from ep_runtime.supervise.limits import LEAVE_SECONDS
from ep_runtime.supervise.lookup import Lookup
from ep_runtime.supervise.loop import Loop, Timer
from ep_runtime.supervise.place import own_cores
from protocol.messages import (
    BeginEpoch,
    EndEpoch,
    EpochLeft,
    FromEngineControl,
    Join,
    KillEngine,
    Loaded,
    OpenEpoch,
    Progress,
    Report,
    Stop,
    ToSupervisor,
    Welcome,
)

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.25
ASKED_SECONDS = 25.0
"""What the head gets to drain and to order the end, when it was asked for it: torchrun kills 30 s after its signal."""


class Supervisor:
    """The worker daemon of one rank. `on_finish(status, cause)` is called once, when the engine is gone and the link is closed.

    It joins over `sock`, or by `connect`; with that it connects again whenever the link is lost, for `patience` seconds (None: for
    ever), and its idle engine keeps its weights meanwhile.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket | None,
        post: Post,
        on_finish: Callable[[int, str], None],
        *,
        connect: Callable[[], socket.socket] | None = None,
        patience: float | None = None,
    ) -> None:
        self._loop = loop
        self._post = post
        self._on_finish = on_finish
        join = Join(
            token=post.token or "",
            host=post.host,
            boot=post.boot,
            rank=post.rank,
            device=f"device {post.device_index}",
            package=package_version(),
        )
        self._head = HeadLink(
            loop,
            join,
            sock=sock,
            connect=connect,
            patience=patience,
            on_message=self._from_head,
            on_lost=self._head_lost,
            on_given_up=self._given_up,
        )
        self._keeper = EngineKeeper(loop, post, self._from_engine, self._engine_died)
        self._lookup: Lookup | None = None
        self._rank = -1
        self._employed = False
        """The engine works for the head of this connection: what it says is for it."""
        self._leaving: Timer | None = None
        """Set while the engine leaves an epoch because the head was lost; what it says meanwhile is for nobody."""
        self._ticking = False
        self._stopping = False
        self._status, self._cause = 0, ""

    def start(self) -> None:
        """Ask to take part."""
        self._head.start()

    def ask_stop(self, reason: str) -> None:
        """A signal asks this rank to end: the coordinator ends all of them in order. Without one it ends at once."""
        self.expect_end()
        if self._head.welcomed:
            self._head.send(Stop(reason=reason, grace=0.0))
            self._loop.later(ASKED_SECONDS, lambda: self._stop(Stop(reason=f"{reason}, and no word of the head", grace=0.0)))
        else:
            self._stop(Stop(reason=reason, grace=0.0))

    def expect_end(self) -> None:
        """The rank was asked to end, and its coordinator knows."""
        self._keeper.expect_end()

    # The head

    def _from_head(self, message: ToSupervisor) -> None:
        match message:
            case Welcome():
                self._welcome(message)
            case OpenEpoch() | BeginEpoch() | EndEpoch():
                if isinstance(message, OpenEpoch) and self._rank == 0:
                    clear_epochs(self._post.runtime_dir)
                self._keeper.tell(message)
                self._tick()
            case KillEngine(reason):
                self._kill(reason)
            case Stop():
                self._stop(message)

    def _kill(self, reason: str) -> None:
        """The coordinator's order. An engine that still loads is not the one that it means: that one has died meanwhile."""
        engine = self._keeper.engine
        if engine is not None and engine.state is not EngineState.STARTING:
            self._keeper.kill(reason)

    def _welcome(self, welcome: Welcome) -> None:
        self._rank = welcome.rank
        config = RuntimeConfig.from_json(welcome.config)
        self._cancel_lookup()
        self._lookup = Lookup(
            self._loop, config.model, lambda folder: self._found(welcome, config, folder), lambda why: self._missing(why)
        )
        self._lookup.start()

    def _found(self, welcome: Welcome, config: RuntimeConfig, folder: Path) -> None:
        self._lookup = None
        local = localise(
            config,
            model=str(folder),
            cores=own_cores(),
            local_world=self._post.local_world,
            token=self._post.token,
        )
        threads = local.threads or 1
        job = Job(
            Welcome(rank=welcome.rank, world=welcome.world, config=local.to_json()),
            threads,
            config.standby,
            config.max_failed_starts,
            (welcome.rank, welcome.world, config.digest(), local.model, threads),
        )
        self._employed = True
        before = self._keeper.engine
        self._keeper.employ(job)
        engine = self._keeper.engine
        if engine is not before:
            self._has_left()  # with its process; the next one has nothing to leave
        if engine is not None and engine.state is EngineState.IDLE:
            log.info("rank %d: its engine, process %d, has its weights still", self._rank, engine.pid)
            self._head.send(Loaded(rank=self._rank))

    def _missing(self, why: str) -> None:
        self._lookup = None
        self._fail(why)
        self._head.send(Report(rank=self._rank, epoch=0, error="ModelNotFound", message=why, fatal=True))

    def _head_lost(self, error: str) -> None:
        """Another connection will be made: the engine waits for it, in no epoch."""
        self._employed = False
        self._cancel_lookup()
        if self._stopping:
            self._head.close()
            return
        log.warning("rank %d: lost the head: %s", self._rank, error)
        engine = self._keeper.engine
        if engine is None or engine.state not in (EngineState.BUSY, EngineState.LEAVING):
            return
        if engine.state is EngineState.BUSY:
            engine.tell(EndEpoch(epoch=engine.epoch, reason=f"lost the head: {error}"))
        if self._leaving is None:  # else the next head was lost as well, and its time runs already
            self._leaving = self._loop.later(LEAVE_SECONDS, self._left_late)

    def _left_late(self) -> None:
        self._keeper.kill(f"it did not leave its epoch within {LEAVE_SECONDS:g} s of losing the head")

    def _given_up(self, cause: str) -> None:
        if not self._stopping:
            self._fail(cause)
        self._stop(Stop(reason=cause, grace=0.0))

    # The engine

    def _from_engine(self, message: FromEngineControl) -> None:
        if self._leaving is not None:
            if isinstance(message, EpochLeft):
                self._has_left()
                if self._employed:
                    self._head.send(Loaded(rank=self._rank))
            return
        if self._employed:
            self._head.send(message)

    def _engine_died(self, death: Death) -> None:
        self._has_left()
        if self._employed:
            report = Report(
                rank=self._rank,
                epoch=death.epoch,
                error=death.error,
                message=death.message,
                ended=True,
                outside=death.outside,
                alone=death.alone,
            )
            self._head.send(report)

    def _has_left(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    def _tick(self) -> None:
        """Begin to tell the coordinator where the engine is, until it is in no epoch any more."""
        if not self._ticking:
            self._ticking = True
            self._loop.later(PROGRESS_SECONDS, self._tell_progress)

    def _tell_progress(self) -> None:
        self._ticking = False
        engine = self._keeper.engine
        if engine is None or not self._employed or engine.state not in (EngineState.BUSY, EngineState.LEAVING):
            return
        at = engine.position()
        self._head.send(
            Progress(
                rank=self._rank,
                epoch=at.epoch,
                step=at.step,
                command=at.command_name,
                phase=at.phase.name,
                collectives=at.collectives,
                moves=at.moves,
                idle_s=at.idle_s,
            )
        )
        self._tick()

    # The end

    def _stop(self, message: Stop) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._has_left()
        self._cancel_lookup()
        if not self._head.welcomed:
            self._head.close()
        self._keeper.stop(message, self._leave)

    def _cancel_lookup(self) -> None:
        if self._lookup is not None:
            self._lookup.cancel()
            self._lookup = None

    def _fail(self, cause: str) -> None:
        if self._status == 0:
            self._status, self._cause = 1, cause

    def _leave(self) -> None:
        self._head.close()
        self._on_finish(self._status, self._cause)
