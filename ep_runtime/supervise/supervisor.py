"""One rank's supervisor: joins, runs the rank's engine, carries messages between it and the coordinator, and ends it."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ep_runtime.config import RuntimeConfig, localise
from ep_runtime.supervise.coordinator import package_version
from ep_runtime.supervise.evidence import ENGINE_EXITED, ENGINE_KILLED
from ep_runtime.supervise.loop import Loop
from ep_runtime.supervise.membership import FIRST_EPOCH
from ep_runtime.supervise.place import own_cores
from ep_runtime.supervise.process import Child, Exit
from ep_runtime.supervise.source import ModelNotFound, model_folder
from protocol.errors import EpLinkLost
from protocol.message_socket import MessageSocket
from protocol.messages import (
    BeginEpoch,
    EndEpoch,
    FromEngineControl,
    Join,
    Message,
    OpenEpoch,
    Refused,
    Report,
    Stop,
    ToSupervisor,
    Welcome,
)

log = logging.getLogger(__name__)

KILL_SECONDS = 2.0
"""Between SIGTERM and SIGKILL."""
SEND_SECONDS = 5.0
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


def engine_environment(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """The parent's environment for an engine: without the launcher's ranks, with the thread count of the configuration."""
    kept = {
        name: value for name, value in environ.items() if name not in LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    return kept | {"OMP_NUM_THREADS": str(threads)}


class Supervisor:
    """The worker daemon of one rank. `on_finish(status, cause)` is called once, when the engine is gone and the link is closed."""

    def __init__(self, loop: Loop, sock: socket.socket, post: Post, on_finish: Callable[[int, str], None]) -> None:
        self._loop = loop
        self._post = post
        self._on_finish = on_finish
        self._head = MessageSocket(sock, ToSupervisor, peer="the head")
        self._connected = True
        self._rank = -1
        self._epoch = FIRST_EPOCH
        self._engine: Child | None = None
        self._control: MessageSocket | None = None
        self._stopping = False
        self._sent: set[signal.Signals] = set()
        self._status, self._cause = 0, ""

    def start(self) -> None:
        """Ask to take part."""
        self._loop.watch(self._head.fileno(), self._from_head)
        join = Join(
            token=self._post.token or "",
            host=self._post.host,
            boot=self._post.boot,
            rank=self._post.rank,
            device=f"device {self._post.device_index}",
            package=package_version(),
        )
        self._tell_head(join)

    def ask_stop(self, reason: str) -> None:
        """A signal asks this rank to end: the coordinator ends all of them in order."""
        if self._connected:
            self._tell_head(Stop(reason=reason, grace=0.0))
        else:
            self._stop_engine(0.0)

    # Messages

    def _from_head(self) -> None:
        try:
            messages = self._head.ready()
        except EpLinkLost as error:
            self._head_lost(str(error))
            return
        for message in messages:
            if self._connected:
                self._take(message)

    def _take(self, message: ToSupervisor) -> None:
        match message:
            case Welcome():
                self._welcome(message)
            case Refused(reason):
                self._fail(f"refused by the head: {reason}")
                self._stop_engine(0.0)
            case OpenEpoch() | BeginEpoch() | EndEpoch():
                self._epoch = message.epoch
                self._tell_engine(message)
            case Stop(_, grace):
                self._tell_engine(message)
                self._stop_engine(grace)

    def _welcome(self, welcome: Welcome) -> None:
        self._rank = welcome.rank
        config = RuntimeConfig.from_json(welcome.config)
        try:
            folder = model_folder(config.model)
        except ModelNotFound as error:
            self._report("ModelNotFound", str(error))
            return
        local = localise(
            config,
            model=str(folder),
            cores=own_cores(),
            local_world=self._post.local_world,
            token=self._post.token,
        )
        self._start_engine(Welcome(rank=welcome.rank, world=welcome.world, config=local.to_json()), local.threads or 1)

    def _tell_head(self, message: Message) -> None:
        if not self._connected:
            return
        try:
            self._head.send(message, timeout=SEND_SECONDS)
        except EpLinkLost as error:
            self._head_lost(str(error))

    def _tell_engine(self, message: Message) -> None:
        if self._control is None:
            return
        try:
            self._control.send(message, timeout=SEND_SECONDS)
        except EpLinkLost as error:
            log.debug("rank %d: the engine takes no message: %s", self._rank, error)  # its end is reported from its pidfd

    def _from_engine(self) -> None:
        assert self._control is not None
        try:
            for message in self._control.ready():
                self._tell_head(message)
        except EpLinkLost as error:
            log.debug("rank %d: control link: %s", self._rank, error)
            self._close_control()

    def _head_lost(self, error: str) -> None:
        if not self._connected:
            return
        self._disconnect()
        if not self._stopping:
            self._fail(f"lost the head: {error}")
        self._stop_engine(0.0)

    # The engine's life

    def _start_engine(self, welcome: Welcome, threads: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = ["--control-fd", str(theirs.fileno()), "--runtime-dir", str(self._post.runtime_dir)]
            arguments += ["--device-index", str(self._post.device_index), "--local-ranks", str(self._post.local_world)]
            self._engine = Child(
                f"engine {welcome.rank}",
                self._post.engine_module,
                arguments,
                environment=engine_environment(os.environ, threads),
                pass_fds=[theirs.fileno()],
            )
        self._control = MessageSocket(ours, FromEngineControl, peer=f"the engine of rank {welcome.rank}")
        self._loop.watch(self._control.fileno(), self._from_engine)
        self._loop.watch(self._engine.pidfd, self._engine_ended)
        self._tell_engine(welcome)

    def _engine_ended(self) -> None:
        assert self._engine is not None
        if self._control is not None:
            self._from_engine()  # its last words come before the word of its death
        self._loop.forget(self._engine.pidfd)
        how = self._engine.reap()
        self._close_control()
        if not self._expected(how):
            self._report(ENGINE_KILLED if how.signal is not None else ENGINE_EXITED, f"its engine ended: {how}")
        if self._stopping:
            self._leave()

    def _expected(self, how: Exit) -> bool:
        """True for an end that was asked for: exit 0, or a signal that came from here, after STOP."""
        return self._stopping and (how.clean or how.signal in self._sent)

    def _stop_engine(self, grace: float) -> None:
        """SIGTERM after `grace` seconds, SIGKILL after `KILL_SECONDS` more; then leave."""
        if self._stopping:
            return
        self._stopping = True
        if self._engine is None or not self._engine.alive:
            self._leave()
            return
        self._loop.later(grace, lambda: self._kill(signal.SIGTERM, grace > 0))
        self._loop.later(grace + KILL_SECONDS, lambda: self._kill(signal.SIGKILL, True))

    def _kill(self, number: signal.Signals, patient: bool) -> None:
        assert self._engine is not None
        if self._engine.alive:
            log.log(logging.WARNING if patient else logging.DEBUG, "rank %d: %s to its engine", self._rank, number.name)
            self._sent.add(number)
            self._engine.send(number)

    def _close_control(self) -> None:
        if self._control is not None:
            self._loop.forget(self._control.fileno())
            self._control.close()
            self._control = None

    # The end

    def _report(self, error: str, message: str) -> None:
        self._fail(message)
        self._tell_head(Report(rank=self._rank, epoch=self._epoch, error=error, message=message))

    def _fail(self, cause: str) -> None:
        if self._status == 0:
            self._status, self._cause = 1, cause

    def _disconnect(self) -> None:
        if self._connected:
            self._connected = False
            self._loop.forget(self._head.fileno())
            self._head.close()

    def _leave(self) -> None:
        self._disconnect()
        self._on_finish(self._status, self._cause)
