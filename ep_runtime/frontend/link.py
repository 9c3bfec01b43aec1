"""The frontend's sockets. It binds `ipc://DIR/frontend` (PULL) for its whole life; the engine of epoch N binds `ipc://DIR/engine-N`
(PULL) and connects to the former.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

from protocol.codec import encode
from protocol.messages import ToEngine

INBOX_MESSAGES = 10_000
"""Messages that wait here while the event loop is busy; what comes beyond them waits in the engine."""


class Link(Protocol):
    """What the engine's client needs of its sockets."""

    async def receive(self) -> bytes:
        """The next message, as it came."""
        ...

    def connect(self, epoch: int) -> None:
        """From now on `send` goes to the engine of this epoch; what was not sent to the one before is dropped."""
        ...

    def disconnect(self) -> None:
        """No engine runs."""
        ...

    def send(self, message: ToEngine) -> None:
        """Queue one message for the connected engine; never waits."""
        ...

    def close(self) -> None:
        """Release everything; unsent messages are dropped."""
        ...


class ZmqLink:
    """The link over ZeroMQ. All methods run on the event loop's thread."""

    def __init__(self, runtime_dir: str | Path) -> None:
        self._dir = Path(runtime_dir)
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set(zmq.RCVHWM, INBOX_MESSAGES)
        self._inbox.bind(f"ipc://{self._dir}/frontend")
        self._outbox: zmq.Socket[bytes] | None = None

    async def receive(self) -> bytes:
        """The next message, as it came."""
        return await self._inbox.recv()

    def connect(self, epoch: int) -> None:
        """Send to the engine of this epoch from now on."""
        self.disconnect()
        self._outbox = zmq.Socket(zmq.Context(self._context), zmq.PUSH)
        # No high-water mark, so that a send never blocks the loop: what admission counts bounds what can wait here.
        self._outbox.set(zmq.SNDHWM, 0)
        self._outbox.connect(f"ipc://{self._dir}/engine-{epoch}")

    def disconnect(self) -> None:
        """Drop the engine and what was not sent to it."""
        if self._outbox is not None:
            self._outbox.close(linger=0)
            self._outbox = None

    def send(self, message: ToEngine) -> None:
        """Queue one message."""
        assert self._outbox is not None
        # Not copied again where it is large, which it is by its images alone.
        self._outbox.send(encode(message), zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Close the sockets."""
        self.disconnect()
        self._inbox.close(linger=0)
        self._context.term()
