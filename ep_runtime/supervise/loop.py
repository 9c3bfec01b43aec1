"""A small event loop: readable descriptors, timers, signals, and calls that other threads hand over, all on the main thread."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import signal
import socket
import time
from collections import deque
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
        self._wake_write.setblocking(False)
        self._woken: deque[Callback] = deque()
        self._handled: list[signal.Signals] = []
        self.watch(self._wake_read.fileno(), self._run_woken)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._handled:
            signal.signal(number, signal.SIG_IGN)
        if self._handled:
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
        """Call `callback` from the loop, not from the handler, for each of these signals.

        After the loop they are ignored: a process whose loop is over is ending in order, and one more request to end must not
        change its exit status.
        """
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)

        def note(number: int, _: FrameType | None) -> None:
            self._woken.append(lambda: callback(signal.Signals(number)))

        for number in numbers:
            signal.signal(number, note)
            self._handled.append(number)

    def call_from_thread(self, callback: Callback) -> None:
        """Call `callback` once from the loop; any thread may ask for it, also when the loop is over: then nothing happens."""
        self._woken.append(callback)
        with contextlib.suppress(OSError):  # a full socket wakes the loop as well, a closed one has no loop to wake
            self._wake_write.send(b"\0")

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

    def _run_woken(self) -> None:
        self._wake_read.recv(4096)
        while self._running and self._woken:
            self._woken.popleft()()

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
