"""One non-blocking stream socket with its receive buffer, and the wait rule that every link shares.

A wait sleeps in slices of 20 ms at most, so that data, the end of the stream, the epoch's closed flag or the deadline ends it
within that time.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from time import monotonic

from protocol.errors import EpDeadline, EpEpochClosed, EpFrameCorrupt, EpLinkLost, EpPeerGone

SLICE_MS = 20
_RECEIVE_BYTES = 1 << 16
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


def never_closed() -> bool:
    """The closed flag of a link that belongs to no epoch."""
    return False


class Wait:
    """When to stop waiting. `deadline` is in `time.monotonic()` seconds, None for no end; `what` words what is missing."""

    __slots__ = ("_closed", "_deadline", "_error", "_late", "_what")

    def __init__(self, closed: Callable[[], bool], deadline: float | None, what: Callable[[], str]) -> None:
        self._closed = closed
        self._deadline = deadline
        self._what = what
        self._error: type[EpLinkLost] = EpDeadline
        self._late = False

    def shorten(self, deadline: float, error: type[EpLinkLost]) -> None:
        """End at `deadline` with `error`, if that is earlier than what was due."""
        if self._deadline is None or deadline < self._deadline:
            self._deadline, self._error = deadline, error

    def slice(self) -> int:
        """Milliseconds that the next poll may sleep.

        Raises `EpEpochClosed`, or `EpDeadline` once the deadline has passed. The first call after that still grants one poll
        without sleep: what came while this process was stopped counts as come in time.
        """
        if self._closed():
            raise EpEpochClosed(f"epoch closed while waiting for {self._what()}")
        if self._deadline is None:
            return SLICE_MS
        left = self._deadline - monotonic()
        if left > 0:
            return min(SLICE_MS, int(left * 1000) + 1)
        if self._late:
            raise self._error(f"deadline passed while waiting for {self._what()}")
        self._late = True
        return 0


class Channel:
    """A stream socket, owned and closed by this object, used by one thread. `limit` bounds what the buffer may hold unread."""

    def __init__(self, sock: socket.socket, peer: str, limit: int = 1 << 27) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._limit = limit
        self._cause = "end of stream"
        self.peer = peer
        self.fd = sock.fileno()
        self.buffer = bytearray()
        self.eof = False
        self._readable = select.poll()
        self._readable.register(self.fd, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(self.fd, select.POLLOUT | select.POLLRDHUP)

    def fill(self) -> None:
        """Move what the kernel has (at most 64 KiB) to the buffer. At the end of the stream `eof` is set."""
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as fault:
            self._end(str(fault))
            return
        if not data:
            self._end("end of stream")
        self.buffer += data
        if len(self.buffer) > self._limit:
            raise EpFrameCorrupt(f"{self.peer} sent more than {self._limit} bytes that nobody asked for")

    def take(self, size: int) -> bytes:
        """The first `size` bytes of the buffer, which holds them."""
        with memoryview(self.buffer) as view:
            data = bytes(view[:size])
        del self.buffer[:size]
        return data

    def need(self, size: int, wait: Wait) -> None:
        """Wait until the buffer holds `size` bytes; raises `EpPeerGone` if the stream ends before."""
        while len(self.buffer) < size:
            if self.eof:
                raise self.gone()
            if self._readable.poll(wait.slice()):
                self.fill()

    def send_some(self, data: bytes | memoryview) -> int:
        """Bytes that the kernel takes now, 0 if none."""
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as fault:
            self._end(str(fault))
            raise self.gone() from fault

    def send_all(self, data: bytes, wait: Wait) -> None:
        """Wait until the kernel has taken all of `data`. Nothing is read meanwhile: the peer must be one that reads."""
        sent = self.send_some(data)
        if sent == len(data):
            return
        with memoryview(data) as view:
            while sent < len(data):
                events = self._writable.poll(wait.slice())
                if events and events[0][1] & _GONE:
                    self._end("the peer closed it while it was sent to")
                    raise self.gone()
                sent += self.send_some(view[sent:])

    def gone(self) -> EpPeerGone:
        """The error that says that this peer is gone."""
        return EpPeerGone(f"{self.peer} is gone: {self._cause}")

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._sock.close()

    def _end(self, cause: str) -> None:
        self.eof, self._cause = True, cause
