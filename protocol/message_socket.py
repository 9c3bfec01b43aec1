"""A stream socket that carries messages: supervisors, the coordinator and engines talk through it."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from protocol.channel import Channel, Wait, never_closed
from protocol.codec import MAX_MESSAGE, MessageStream, MessageTypes, encode, pack_blob
from protocol.messages import Message

_PENDING = 1024
"""Received messages that may wait unread while a send is stuck; beyond them the socket is left unread."""


class MessageSocket:
    """Owns `sock`; receives the messages of table `union`. One thread uses it. `fileno()` goes into a poll set.

    `limit` bounds a received message, in bytes: a peer that is not yet known gets little memory, until `trust`.
    """

    def __init__(
        self,
        sock: socket.socket,
        union: MessageTypes,
        *,
        peer: str = "peer",
        closed: Callable[[], bool] = never_closed,
        limit: int = MAX_MESSAGE,
    ) -> None:
        self._channel = Channel(sock, peer, limit=2 * MAX_MESSAGE)
        self._stream = MessageStream(union, limit)
        self._closed = closed
        self._pending: deque[Any] = deque()

    def trust(self) -> None:
        """From now on messages may be as long as any."""
        self._stream.limit = MAX_MESSAGE

    @property
    def peer(self) -> str:
        """Who is at the other end, for error messages."""
        return self._channel.peer

    def fileno(self) -> int:
        """The descriptor to poll for reading. Poll it only after `ready()` has returned nothing: messages may be buffered here."""
        return self._channel.fd

    def send(self, message: Message, timeout: float | None = None) -> None:
        """Send whole, reading meanwhile, so that two peers who send at once do not wait for each other.

        Raises `EpPeerGone`, or `EpDeadline` after `timeout` seconds; the stream is then cut inside a message and of no more use.
        """
        data = pack_blob(encode(message))
        sent = self._channel.send_some(data)
        if sent == len(data):
            return
        wait = Wait(self._closed, _deadline(timeout), lambda: f"{self.peer} to read {len(data)} bytes")
        poller = select.poll()
        with memoryview(data) as view:
            while sent < len(data):
                if self._channel.eof:
                    raise self._channel.gone()
                reading = select.POLLIN if len(self._pending) < _PENDING else 0
                poller.register(self._channel.fd, select.POLLOUT | reading)
                for _, event in poller.poll(wait.slice()):
                    if event & ~select.POLLOUT:
                        self._read()
                    if event & select.POLLOUT:
                        sent += self._channel.send_some(view[sent:])

    def recv(self, timeout: float | None = None) -> Any:
        """The next message; raises `EpDeadline` after `timeout` seconds, `EpPeerGone` at the end of the stream."""
        if self._pending:
            return self._pending.popleft()
        wait = Wait(self._closed, _deadline(timeout), lambda: f"a message of {self.peer}")
        poller = select.poll()
        poller.register(self._channel.fd, select.POLLIN)
        while not self._pending:
            if self._channel.eof:
                raise self._channel.gone()
            if poller.poll(wait.slice()):
                self._read()
        return self._pending.popleft()

    def ready(self) -> list[Any]:
        """Every message that has come, without waiting. Raises `EpPeerGone` once the stream has ended and all are handed out."""
        if not self._channel.eof:
            self._read()
        messages = list(self._pending)
        self._pending.clear()
        if not messages and self._channel.eof:
            raise self._channel.gone()
        return messages

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._channel.close()

    def _read(self) -> None:
        self._channel.fill()
        data = self._channel.take(len(self._channel.buffer))
        if data:
            self._pending.extend(self._stream.feed(data))


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else monotonic() + timeout
