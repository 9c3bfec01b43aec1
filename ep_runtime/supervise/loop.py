"""A small event loop: readable descriptors, timers and signals, all on the main thread."""

from __future__ import annotations

import heapq
import itertools
import selectors
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

Callback = Callable[[], None]


class Timer:
    """A callback due later; `cancel` may be called at any time."""

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """The callback will not run."""
        self.callback = None


class Loop:
    """Owns the selector and the process's signal handlers while it is open."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._running = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._old_handlers: dict[signal.Signals, object] = {}
        self._pending_signals: list[signal.Signals] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._old_handlers:
            signal.set_wakeup_fd(-1)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def watch(self, fd: int, callback: Callback) -> None:
        """Call `callback` whenever `fd` is readable or at its end."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`; call it before closing the descriptor."""
        self._selector.unregister(fd)

    def later(self, seconds: float, callback: Callback) -> Timer:
        """Call `callback` once, `seconds` from now."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def on_signals(self, numbers: list[signal.Signals], callback: Callable[[signal.Signals], None]) -> None:
        """Call `callback` from the loop, not from the handler, for each of these signals."""
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)

        def note(number: int, _: FrameType | None) -> None:
            self._pending_signals.append(signal.Signals(number))

        def deliver() -> None:
            self._wake_read.recv(4096)
            while self._pending_signals:
                callback(self._pending_signals.pop(0))

        self.watch(self._wake_read.fileno(), deliver)
        for number in numbers:
            self._old_handlers[number] = signal.signal(number, note)

    def stop(self) -> None:
        """End `run` after the callback that is running."""
        self._running = False

    def run(self) -> None:
        """Serve callbacks until `stop`."""
        self._running = True
        while self._running:
            for key, _ in self._selector.select(self._next_wait()):
                # an earlier callback of this round may have forgotten it
                if self._running and self._selector.get_map().get(key.fd) is key:
                    key.data()
            self._run_timers()

    def _next_wait(self) -> float | None:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._running and self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                timer.callback()
