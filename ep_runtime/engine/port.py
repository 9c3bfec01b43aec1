"""How requests reach the head and results leave it: over ZeroMQ from the frontend, or in process for offline use."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from protocol.codec import decode, encode
from protocol.errors import EpFrameCorrupt
from protocol.messages import EpochEnded, EpochReady, Results, ToEngine, ToFrontend

log = logging.getLogger(__name__)

RECEIVE_MESSAGES = 100_000
"""Requests and masks that may wait for the head; past that they wait in the frontend, whose journal is bounded."""

SEND_MESSAGES = 4_000
"""Results that may wait for the frontend, seconds of decoding: past that no steps are made until it reads again."""

CLOSE_LINGER_MS = 1000


@dataclass(frozen=True, slots=True)
class Undecodable:
    """A message of the frontend that is none, but says which request it is of. `kind` is its tag, as far as that can be read."""

    request_id: str
    kind: str
    fault: str


@dataclass(frozen=True, slots=True)
class FrontendLost:
    """The frontend's process ended, and with it every request that it had sent."""


Received = ToEngine | Undecodable | FrontendLost


class Port(Protocol):
    """The head's only door to its users."""

    @property
    def congested(self) -> bool:
        """True while results wait here because the way to the user is full: then no more should be made."""
        ...

    def receive(self, wait_s: float) -> list[Received]:
        """What has arrived; waits up to `wait_s` seconds for the first. Nothing is received while congested."""
        ...

    def publish(self, message: ToFrontend) -> None:
        """Hand on one message; never waits, never loses it while this port lives."""
        ...


class ZmqPort:
    """Binds `engine-<epoch>` and pushes to `frontend` in the runtime directory.

    The epoch is part of the name: an engine never receives what was sent to the one before it. `undecodable` counts the messages
    that were refused.
    """

    def __init__(self, runtime_dir: Path, epoch: int, wake_fd: int | None = None, *, send_messages: int = SEND_MESSAGES) -> None:
        self.undecodable = 0
        self._unsent: deque[bytes] = deque()
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, RECEIVE_MESSAGES)
        self._inbox.bind(f"ipc://{runtime_dir}/engine-{epoch}")
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.SNDHWM, send_messages)
        self._outbox.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
        self._losses = self._outbox.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._outbox.connect(f"ipc://{runtime_dir}/frontend")
        self._poller = zmq.Poller()
        self._poller.register(self._losses, zmq.POLLIN)
        if wake_fd is not None:
            self._poller.register(wake_fd, zmq.POLLIN)
        self._poller.register(self._inbox, zmq.POLLIN)

    @property
    def congested(self) -> bool:
        """True while some results did not fit into the queue to the frontend."""
        return bool(self._unsent)

    def receive(self, wait_s: float) -> list[Received]:
        """What is here; the loss of a frontend comes before what its successor sent. `wake_fd` ends the wait too.

        While congested only a way out is waited for. What arrives meanwhile stays in the inbox, whose bound bounds it.
        """
        if wait_s > 0:
            self._wait(wait_s)
        self._flush()
        received: list[Received] = [FrontendLost()] if self._lost() else []
        while not self._unsent:
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                received.append(decode(ToEngine, data))
            except EpFrameCorrupt as error:
                self._refuse(data, error, received)
        return received

    def publish(self, message: ToFrontend) -> None:
        """Queue one message for the frontend, behind those that wait."""
        self._unsent.append(encode(message))
        self._flush()

    def close(self, linger_ms: int = CLOSE_LINGER_MS) -> None:
        """Send what is queued, for at most that long, and release the endpoints."""
        self._flush()
        self._outbox.disable_monitor()
        self._losses.close(0)
        self._inbox.close(0)
        self._outbox.close(linger_ms)
        self._context.term()

    def _wait(self, wait_s: float) -> None:
        self._poller.register(self._inbox, 0 if self._unsent else zmq.POLLIN)
        self._poller.register(self._outbox, zmq.POLLOUT if self._unsent else 0)
        self._poller.poll(max(1, int(wait_s * 1000)))

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._outbox.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.popleft()

    def _lost(self) -> bool:
        """Whether a frontend was disconnected since the last call."""
        lost = False
        while self._losses.poll(0):
            self._losses.recv_multipart()
            lost = True
        return lost

    def _refuse(self, data: bytes, error: EpFrameCorrupt, received: list[Received]) -> None:
        self.undecodable += 1
        log.error("message of %d bytes from the frontend is refused, the %d. of its kind: %s", len(data), self.undecodable, error)
        found = salvage(data, str(error))
        if found is not None:
            received.append(found)


def salvage(data: bytes, fault: str) -> Undecodable | None:
    """Whose message this would have been, if it is msgpack and names a request; otherwise None."""
    try:
        envelope = msgspec.msgpack.decode(data, type=tuple[object, dict[str, object]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    fields = envelope[1]
    request_id, kind = fields.get("request_id"), fields.get("type")
    if not isinstance(request_id, str):
        return None
    return Undecodable(request_id, kind if isinstance(kind, str) else "", fault)


class LocalPort:
    """The port of a head that lives in its user's process: a queue, and a callback that takes whatever comes."""

    congested = False

    def __init__(self, on_results: Callable[[Results], None]) -> None:
        self._inbox: deque[ToEngine] = deque()
        self._on_results = on_results

    def send(self, message: ToEngine) -> None:
        """Hand a message to the head."""
        self._inbox.append(message)

    def receive(self, wait_s: float) -> list[Received]:
        """Everything sent so far; there is nobody to wait for."""
        messages: list[Received] = list(self._inbox)
        self._inbox.clear()
        return messages

    def publish(self, message: ToFrontend) -> None:
        """Results go to the callback; epochs concern servers alone."""
        match message:
            case Results():
                self._on_results(message)
            case EpochReady() | EpochEnded():
                pass
