"""A rank's standby: a process that waits to become the engine. If it ends while it waits, another is started, within limits."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ep_runtime.supervise.backoff import start_pause
from ep_runtime.supervise.engine_process import EngineProcess
from ep_runtime.supervise.loop import Loop, Timer
from ep_runtime.supervise.process import Exit

log = logging.getLogger(__name__)

STANDS_SECONDS = 60.0
"""One that has waited so long has stood: whatever ends it then says nothing of how long the next one will."""


class Standby:
    """`process` is the one that waits. `start` makes one, or raises `OSError`; `allowed` says whether one may be started now."""

    def __init__(self, loop: Loop, start: Callable[[], EngineProcess], allowed: Callable[[], bool]) -> None:
        self._loop = loop
        self._start = start
        self._allowed = allowed
        self.process: EngineProcess | None = None
        self._rank = -1
        self._limit = 1
        self._failed = 0
        """Those in a row that ended before they had stood."""
        self._pause: Timer | None = None

    def employ(self, rank: int, limit: int) -> None:
        """Stand by for this rank. When `limit` of them in a row have not stood, no other is started but by `want`."""
        self._rank, self._limit = rank, limit

    def want(self) -> None:
        """Start one, if one may be started and there is none; if one is due later, that stays so. To be called once one may be."""
        if self.process is not None or self._pause is not None or not self._allowed():
            return
        try:
            self.process = self._start()
        except OSError as error:
            self._failed += 1
            self._again(f"its standby could not be started: {error}")
            return
        log.info("rank %d: its standby is process %d", self._rank, self.process.pid)

    def take(self) -> EngineProcess | None:
        """The process, which becomes the engine; None if none lives. One that has just ended is still to be told by `ended`."""
        process = self.process
        if process is None or not process.alive:
            return None
        self.process = None
        if process.waited() >= STANDS_SECONDS:
            self._failed = 0
        return process

    def ended(self, how: Exit) -> None:
        """The process has ended, which nobody here wanted."""
        process, self.process = self.process, None
        assert process is not None
        self._failed = 0 if process.waited() >= STANDS_SECONDS else self._failed + 1
        self._again(f"its standby, process {process.pid}, ended: {how}")

    def discard(self) -> EngineProcess | None:
        """The process, which the caller ends. No other is due any more, and what failed before does not count."""
        process, self.process = self.process, None
        self._failed = 0
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        return process

    def _again(self, what: str) -> None:
        """Tell what has happened with what follows, and see to that."""
        pause = start_pause(self._failed)
        given_up = self._failed >= self._limit
        if given_up:
            follows = f"{self._failed} in a row have not stood for {STANDS_SECONDS:g} s: no other before the next epoch runs"
        elif not self._allowed():
            follows = "no other before the next epoch runs"
        else:
            follows = f"another starts in {pause:g} s" if pause else "another starts"
        log.warning("rank %d: %s; %s", self._rank, what, follows)
        if given_up:
            return
        if pause:
            self._pause = self._loop.later(pause, self._due)
        else:
            self.want()

    def _due(self) -> None:
        self._pause = None
        self.want()
