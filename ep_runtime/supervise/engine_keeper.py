"""Keeps one rank's engine: starts it, starts another when it has ended, has a standby while it serves, and ends them all.

```
no engine -> STARTING -> IDLE <-> BUSY, LEAVING
any of these, on the engine's death: the standby becomes the engine, or a new one is started, at once or after a pause
```
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from ep_runtime.supervise.backoff import start_pause
from ep_runtime.supervise.engine_process import Death, EngineProcess, Post
from ep_runtime.supervise.evidence import ENGINE_EXITED
from ep_runtime.supervise.loop import Loop, Timer
from ep_runtime.supervise.process import Exit
from ep_runtime.supervise.standby import Standby
from protocol.messages import BeginEpoch, EndEpoch, FromEngineControl, OpenEpoch, Ready, Stop, Welcome

log = logging.getLogger(__name__)

KILL_SECONDS = 2.0
"""Between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True)
class Job:
    """What an engine is for. Engines of equal `key` can stand in for each other; `welcome` is what this host's engine is told.

    `standby`: whether another one waits beside it; `failed_starts`: how many of those in a row may end before they have stood.
    """

    welcome: Welcome
    threads: int
    standby: bool
    failed_starts: int
    key: tuple[object, ...]


class EngineKeeper:
    """`on_message` gets what the engine says; `on_death` is called before another is started. All on the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        post: Post,
        on_message: Callable[[FromEngineControl], None],
        on_death: Callable[[Death], None],
    ) -> None:
        self._loop = loop
        self._post = post
        self._on_message = on_message
        self._on_death = on_death
        self._job: Job | None = None
        self.engine: EngineProcess | None = None
        self._standby = Standby(loop, self._new_process, self._standby_allowed)
        self._discarded: list[EngineProcess] = []
        """Killed because they are of no more use, and not gone yet."""
        self._failures = 0
        self._restart: Timer | None = None
        self._end_expected = False
        self._stopping = False
        self._on_gone: Callable[[], None] | None = None

    def employ(self, job: Job) -> None:
        """Have an engine for this job: the one that lives, if it can stand in for it, else another as soon as that one is gone."""
        if self._job is not None and self._job.key != job.key:
            self._cancel_restart()
            self._failures = 0
            self._discard_standby()
            if self.engine is not None:
                self._discard(self.engine)
                self.engine = None
        self._job = job
        self._standby.employ(job.welcome.rank, job.failed_starts)
        if self.engine is None and self._restart is None and not self._discarded:
            self._start()

    def tell(self, message: OpenEpoch | BeginEpoch | EndEpoch) -> None:
        """Pass an order to the engine; without one it is dropped: the death that was reported is the answer."""
        if self.engine is not None:
            self.engine.tell(message)

    def kill(self, reason: str) -> None:
        """SIGKILL to the engine, which is replaced like any other that dies."""
        if self.engine is not None:
            log.warning("the engine is killed: %s", reason)
            self.engine.send_signal(signal.SIGKILL, reason)

    def expect_end(self) -> None:
        """The rank was asked to end: until it does, an engine that dies is replaced, but no standby is started any more."""
        self._end_expected = True

    def stop(self, message: Stop, on_gone: Callable[[], None]) -> None:
        """End everything: SIGTERM after the message's grace, SIGKILL `KILL_SECONDS` later; `on_gone` is called once."""
        self._stopping, self._on_gone = True, on_gone
        self._cancel_restart()
        self._discard_standby()
        if self.engine is not None:
            self.engine.stop(message)
            self._loop.later(message.grace, lambda: self._end(signal.SIGTERM, message.grace > 0))
            self._loop.later(message.grace + KILL_SECONDS, lambda: self._end(signal.SIGKILL, True))
        self._check_gone()

    # Starting

    def _start(self) -> None:
        job, wanted = self._job, time.monotonic()
        assert job is not None
        self._restart = None
        engine = self._standby.take()
        what = "a new one" if engine is None else "the standby"
        if engine is None:
            try:
                engine = self._new_process()
            except OSError as error:
                self._failed(Death(ENGINE_EXITED, f"its engine could not be started: {error}"))
                return
        log.info("rank %d: its engine is process %d, %s", job.welcome.rank, engine.pid, what)
        self.engine = engine
        engine.welcome(job.welcome, wanted)

    def _new_process(self) -> EngineProcess:
        assert self._job is not None
        return EngineProcess(self._loop, self._post, self._job.threads, self._heard, self._ended)

    def _standby_allowed(self) -> bool:
        """An engine that starts or forms an epoch has the machine for itself, and a rank that ends needs no other."""
        serves = self.engine is not None and self.engine.serves
        return serves and self._job is not None and self._job.standby and not (self._stopping or self._end_expected)

    def _heard(self, engine: EngineProcess, message: FromEngineControl) -> None:
        if engine is not self.engine:
            log.debug("process %d, which is not the engine, says %s", engine.pid, type(message).__name__)
            return
        if isinstance(message, Ready):
            self._failures = 0
            self._standby.want()
        self._on_message(message)

    # Ends

    def _ended(self, engine: EngineProcess, how: Exit) -> None:
        if engine is self.engine:
            self.engine = None
            if not self._stopping or not engine.asked_for(how):
                self._failed(engine.death(how), was_ready=engine.was_ready)
        elif engine is self._standby.process:
            self._standby.ended(how)
        else:
            self._discarded.remove(engine)
            if self.engine is None and self._restart is None and not self._discarded and not self._stopping:
                self._start()
        self._check_gone()

    def _failed(self, death: Death, *, was_ready: bool = False) -> None:
        """Report it, and have another engine: at once after one that was ready, ever later after starts that failed in a row."""
        self._failures = 0 if was_ready else self._failures + 1
        self._on_death(death)
        if self._stopping:
            return
        pause = start_pause(self._failures)
        log.warning("%s; %s", death.message, f"another starts in {pause:g} s" if pause else "another starts")
        if pause:
            self._restart = self._loop.later(pause, self._start)
        else:
            self._start()

    def _discard_standby(self) -> None:
        standby = self._standby.discard()
        if standby is not None:
            self._discard(standby)

    def _discard(self, engine: EngineProcess) -> None:
        self._discarded.append(engine)
        engine.send_signal(signal.SIGKILL, "it is of no more use")

    def _end(self, number: signal.Signals, patient: bool) -> None:
        if self.engine is not None:
            log.log(logging.WARNING if patient else logging.DEBUG, "%s to its engine", number.name)
            self.engine.send_signal(number, "it did not end in time")

    def _cancel_restart(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None

    def _check_gone(self) -> None:
        if self._stopping and self.engine is None and self._standby.process is None and not self._discarded:
            on_gone, self._on_gone = self._on_gone, None
            if on_gone is not None:
                on_gone()
