"""One engine process as its supervisor sees it: the child, its control socket, its progress page, and what it was told last."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from ep_runtime.supervise.evidence import ENGINE_EXITED, ENGINE_KILLED
from ep_runtime.supervise.loop import Loop, Timer
from ep_runtime.supervise.process import Child, Exit
from ep_runtime.supervise.start_clock import StartClock
from protocol.errors import EpDeadline, EpLinkLost
from protocol.message_socket import MessageSocket
from protocol.messages import (
    BeginEpoch,
    EndEpoch,
    EpochLeft,
    FromEngineControl,
    Loaded,
    OpenEpoch,
    Ready,
    Report,
    Stop,
    ToEngineControl,
    Welcome,
)
from protocol.progress import Phase, Position, ProgressPage

log = logging.getLogger(__name__)

SEND_SECONDS = 5.0
LOOK_SECONDS = 0.05
"""Between looks at the page of an engine that starts: how exactly the phases of a start are told apart."""
OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that come from somebody else; what a process does to itself (SIGSEGV, SIGABRT, SIGBUS) may be a request's fault."""
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "ROLE_RANK",
)
"""Not for engines: their rank and their store come with the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Post:
    """What a supervisor knows of its own place before it joins."""

    rank: int | None
    host: str
    device_index: int
    local_world: int
    runtime_dir: Path
    token: str | None
    boot: str
    engine_module: str


class EngineState(Enum):
    """What the engine is about, by what it was told and has answered."""

    STANDBY = "waits for its Welcome"
    STARTING = "loads"
    IDLE = "has its weights and is in no epoch"
    BUSY = "was told to open or begin an epoch"
    LEAVING = "was told to leave it"


@dataclass(frozen=True, slots=True)
class Death:
    """How an engine ended, in the words of `Report`."""

    error: str
    message: str
    epoch: int = 0
    outside: bool = False
    alone: str = ""


def engine_environment(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """The parent's environment for an engine: without the launcher's ranks, with the thread count of the configuration."""
    kept = {
        name: value for name, value in environ.items() if name not in LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    return kept | {"OMP_NUM_THREADS": str(threads)}


def judge_end(how: Exit, sent: frozenset[signal.Signals], reason: str) -> tuple[str, str, bool]:
    """Error name, message, and whether somebody else did it. `sent`: signals of the own supervisor, `reason`: why it sent them.

    An engine that its supervisor kills has missed a deadline: that is no more than a consequence of what went wrong before.
    """
    if how.signal is None:
        return ENGINE_EXITED, f"its engine ended: {how}", False
    if how.signal in sent:
        return EpDeadline.__name__, f"its engine was killed: {reason}", False
    return ENGINE_KILLED, f"its engine ended: {how}", how.signal in OUTSIDE


class EngineProcess:
    """Started at once, without a rank; `on_message` and `on_end` name the engine that they concern. Raises `OSError`."""

    def __init__(
        self,
        loop: Loop,
        post: Post,
        threads: int,
        on_message: Callable[[EngineProcess, FromEngineControl], None],
        on_end: Callable[[EngineProcess, Exit], None],
    ) -> None:
        self._loop = loop
        self._on_message = on_message
        self._on_end = on_end
        self.state = EngineState.STANDBY
        self.epoch = 0
        self.was_ready = False
        self._serves = False
        self._clock = StartClock()
        self._page, descriptor = ProgressPage.create()
        ours, theirs = socket.socketpair()
        arguments = ["--control-fd", str(theirs.fileno()), "--progress-fd", str(descriptor)]
        arguments += ["--runtime-dir", str(post.runtime_dir)]
        arguments += ["--device-index", str(post.device_index), "--local-ranks", str(post.local_world)]
        try:
            self._child = Child(
                "engine",
                post.engine_module,
                arguments,
                environment=engine_environment(os.environ, threads),
                pass_fds=[theirs.fileno()],
                progress_fd=descriptor,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(descriptor)
        self._control: MessageSocket | None = MessageSocket(ours, FromEngineControl, peer=f"the engine of process {self.pid}")
        self._sent: set[signal.Signals] = set()
        self._reason = ""
        loop.watch(self._control.fileno(), self._readable)
        loop.watch(self._child.pidfd, self._ended)
        self._looking: Timer = loop.later(LOOK_SECONDS, self._look)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """False from the moment of its end on, also before that was noticed."""
        return self._child.running

    @property
    def serves(self) -> bool:
        """True while it lives, from its Ready to the end of that epoch."""
        return self._serves and self.alive

    def position(self) -> Position:
        """Where it is now."""
        return self._page.read()

    def waited(self) -> float:
        """Seconds since it has imported everything, as long as it has no Welcome; else 0. Right at the moment of its end, too."""
        at = self._page.read()
        return at.idle_s if at.phase is Phase.STANDBY else 0.0

    def welcome(self, welcome: Welcome, wanted: float) -> None:
        """Make it the engine of a rank: it loads. Its first message. `wanted`: since when somebody waits (monotonic seconds)."""
        self._clock.want(wanted)
        self._look()
        self.state = EngineState.STARTING
        self._send(welcome)

    def tell(self, message: OpenEpoch | BeginEpoch | EndEpoch) -> None:
        """Pass an order on. One that crossed with the death of the engine before this one is not for it."""
        if self.state in (EngineState.STANDBY, EngineState.STARTING):
            log.debug("process %d loads: %s is not for it", self.pid, type(message).__name__)
            return
        self.state = EngineState.LEAVING if isinstance(message, EndEpoch) else EngineState.BUSY
        self._serves = False
        self.epoch = message.epoch
        self._send(message)

    def send_signal(self, number: signal.Signals, reason: str) -> None:
        """Signal it and everything that it started; this counts as this supervisor's own act, unless it has ended before."""
        if self.alive:
            self._sent.add(number)
            self._reason = reason
        self._child.send(number)

    def stop(self, message: Stop) -> None:
        """Tell it to end, whatever it does."""
        self._send(message)

    def death(self, how: Exit) -> Death:
        """What its supervisor reports of its end."""
        error, message, outside = judge_end(how, frozenset(self._sent), self._reason)
        return Death(error, message, self.epoch, outside, self._page.read().alone)

    def asked_for(self, how: Exit) -> bool:
        """True for an end after STOP that is as it should be: status 0, or a signal that came from here."""
        return how.clean or how.signal in self._sent

    def _send(self, message: ToEngineControl) -> None:
        if self._control is None:
            return
        try:
            self._control.send(message, timeout=SEND_SECONDS)
        except EpLinkLost as error:
            log.debug("process %d takes no message: %s", self.pid, error)  # its end is told by its pidfd
        self._loop.later(0.0, self._readable)  # a send that had to wait has read meanwhile, which wakes nobody

    def _readable(self) -> None:
        """Hand on what has come, as long as there is something."""
        while self._control is not None:
            try:
                messages = self._control.ready()
            except EpLinkLost as error:
                log.debug("process %d, control socket: %s", self.pid, error)
                self._close_control()
                return
            if not messages:
                return
            for message in messages:
                self._note(message)

    def _note(self, message: FromEngineControl) -> None:
        match message:
            case Loaded():
                self.state = EngineState.IDLE
                self._look()
                self._looking.cancel()
                message = msgspec.structs.replace(message, seconds=self._clock.seconds(time.monotonic()))
            case EpochLeft() if self.state is EngineState.LEAVING:  # not when the next epoch was begun meanwhile
                self.state = EngineState.IDLE
            case Ready():
                self.was_ready = True
                self._serves = self.state is EngineState.BUSY and message.epoch == self.epoch
        if isinstance(message, EpochLeft | Report):
            message = msgspec.structs.replace(message, alone=self._page.read().alone)  # the page keeps it until the next epoch
        self._on_message(self, message)

    def _look(self) -> None:
        """Read the page for the clock, again and again while it has something to learn."""
        self._looking.cancel()
        self._clock.look(time.monotonic(), self._page.read())
        if self._clock.learns:
            self._looking = self._loop.later(LOOK_SECONDS, self._look)

    def _ended(self) -> None:
        self._readable()  # its last words come before the word of its death
        self._looking.cancel()
        self._loop.forget(self._child.pidfd)
        how = self._child.reap()
        self._close_control()
        self._on_end(self, how)

    def _close_control(self) -> None:
        if self._control is not None:
            self._loop.forget(self._control.fileno())
            self._control.close()
            self._control = None
