"""How requests reach the head and results leave it: over ZeroMQ from the frontend, or in process for offline use."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import zmq

from protocol.codec import decode, encode
from protocol.errors import EpFrameCorrupt
from protocol.messages import EpochEnded, EpochReady, Results, ToEngine, ToFrontend

log = logging.getLogger(__name__)

SEND_BUFFER_MESSAGES = 100_000
"""Results that may wait for a frontend that is restarting; a live one drains them faster than steps are made."""


class Port(Protocol):
    """The head's only door to its users."""

    def receive(self, wait_s: float) -> list[ToEngine]:
        """Messages that have arrived; waits up to `wait_s` seconds for the first."""
        ...

    def publish(self, message: ToFrontend) -> None:
        """Hand on one message; never waits."""
        ...


class ZmqPort:
    """Binds `engine-<epoch>` and pushes to `frontend` in the runtime directory.

    The epoch is part of the name: an engine never receives what was sent to the one before it.
    """

    def __init__(self, runtime_dir: Path, epoch: int, wake_fd: int | None = None) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, SEND_BUFFER_MESSAGES)
        self._inbox.bind(f"ipc://{runtime_dir}/engine-{epoch}")
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.SNDHWM, SEND_BUFFER_MESSAGES)
        self._outbox.setsockopt(zmq.LINGER, 1000)
        self._outbox.connect(f"ipc://{runtime_dir}/frontend")
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        if wake_fd is not None:
            self._poller.register(wake_fd, zmq.POLLIN)

    def receive(self, wait_s: float) -> list[ToEngine]:
        """Everything that is here; a message that does not decode is refused whole and logged. `wake_fd` ends the wait too."""
        if wait_s > 0:
            self._poller.poll(int(wait_s * 1000))
        messages: list[ToEngine] = []
        while True:
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(decode(ToEngine, data))
            except EpFrameCorrupt as error:
                log.error("a message from the frontend was refused: %s", error)

    def publish(self, message: ToFrontend) -> None:
        """Queue one message for the frontend."""
        self._outbox.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is queued, for at most a second, and release the endpoints."""
        self._inbox.close(0)
        self._outbox.close()
        self._context.term()


class LocalPort:
    """The port of a head that lives in its user's process: two queues."""

    def __init__(self, on_results: Callable[[Results], None]) -> None:
        self._inbox: deque[ToEngine] = deque()
        self._on_results = on_results

    def send(self, message: ToEngine) -> None:
        """Hand a message to the head."""
        self._inbox.append(message)

    def receive(self, wait_s: float) -> list[ToEngine]:
        """Everything sent so far; there is nobody to wait for."""
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def publish(self, message: ToFrontend) -> None:
        """Results go to the callback; epochs concern servers alone."""
        match message:
            case Results():
                self._on_results(message)
            case EpochReady() | EpochEnded():
                pass
