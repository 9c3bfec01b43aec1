"""One client's connection with limits on its patience: a late request head, and output that is not read, end it.

uvicorn bounds the pause between two requests alone, and closes a connection only after its last byte was read.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol. When a time is over it aborts its transport, which frees the request's sequences and the
    file descriptor.
    """

    header_seconds: ClassVar[float]
    write_seconds: ClassVar[float]
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """From now on a request head is awaited."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A request has begun, or its head is still awaited."""
        super().data_received(data)
        if self._between_requests():
            self._await_head()
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def pause_writing(self) -> None:
        """The client does not read as fast as is written."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def on_response_complete(self) -> None:
        """Everything is written; what is not read yet is awaited."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._await_reader()

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._between_requests():
            self.transport.abort()

    def _await_reader(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.write_seconds, self._reader_is_late)

    def _reader_is_late(self) -> None:
        self._write_timer = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = None


def connection_class(header_seconds: float, write_seconds: float) -> type[Connection]:
    """The protocol with these two time limits: uvicorn makes its connections itself, and asks for a class."""
    return type("Connection", (Connection,), {"header_seconds": header_seconds, "write_seconds": write_seconds})
