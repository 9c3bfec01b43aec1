"""The engine's end of the control socket: what its supervisor has said, between epochs and while one runs."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from protocol.errors import EpEpochClosed, EpLinkLost
from protocol.message_socket import MessageSocket
from protocol.messages import EndEpoch, EpochLeft, Message, Stop

SEND_TIMEOUT_S = 10.0


class SupervisorGoneError(Exception):
    """The control socket is of no more use: without a supervisor there is nothing to serve."""


class Control:
    """Owns the socket. `stop` is the Stop that has come, `ended` the EndEpoch of the epoch that is served now.

    `closed` is the epoch's flag, which every wait looks at. While the epoch forms, a Stop closes it too; once it runs, the head
    finishes what it has and leaves in order.
    """

    def __init__(self, sock: MessageSocket) -> None:
        self._sock = sock
        self._later: deque[Any] = deque()
        self._stopped_at = 0.0
        self._epoch: int | None = None
        self._forming = False
        self.rank = 0
        self.stop: Stop | None = None
        self.ended: EndEpoch | None = None

    def fileno(self) -> int:
        """The descriptor to poll while idle."""
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Say something to the supervisor."""
        try:
            self._sock.send(message, SEND_TIMEOUT_S)
        except EpLinkLost as error:
            raise SupervisorGoneError(str(error)) from error

    def next(self) -> Any:
        """The next message while no epoch is served; waits for it. A Stop is noted as well."""
        if self._later:
            message = self._later.popleft()
        else:
            try:
                message = self._sock.recv()
            except EpLinkLost as error:
                raise SupervisorGoneError(str(error)) from error
        if isinstance(message, Stop):
            self._note_stop(message)
        return message

    # While an epoch is served

    def enter(self, epoch: int) -> None:
        """This epoch forms from now on."""
        self._epoch, self._forming, self.ended = epoch, True, None

    def formed(self) -> None:
        """It runs."""
        self._forming = False

    def leave(self) -> None:
        """It is left: every message that waits is for what comes after it. Answers the EndEpoch that has come."""
        ended, self.ended, self._epoch = self.ended, None, None
        if ended is not None:
            self.answer(ended)

    def answer(self, ended: EndEpoch) -> None:
        """This process holds nothing of that epoch."""
        self.send(EpochLeft(ended.epoch, self.rank))

    def closed(self) -> bool:
        """Read what has come, without waiting; whether the epoch is over."""
        try:
            messages = self._sock.ready()
        except EpLinkLost as error:
            raise SupervisorGoneError(str(error)) from error
        for message in messages:
            self._take(message)
        return self.ended is not None or (self._forming and self.stop is not None)

    def check(self) -> None:
        """Raise `EpEpochClosed` if the epoch is over."""
        if self.closed():
            assert self.ended is not None or self.stop is not None
            raise EpEpochClosed(self.ended.reason if self.ended is not None else "the server stops")

    def stopping(self) -> bool:
        """Whether to finish and leave in order; raises `EpEpochClosed` if the epoch is over."""
        self.check()
        return self.stop is not None

    def grace_left(self) -> float:
        """Seconds that are left of the Stop's grace."""
        assert self.stop is not None
        return self._stopped_at + self.stop.grace - time.monotonic()

    def _take(self, message: Any) -> None:
        """What follows the epoch's end, such as the next epoch, waits until this one is left."""
        match message:
            case _ if self.ended is not None:
                self._later.append(message)
            case Stop():
                self._note_stop(message)
            case EndEpoch() if message.epoch == self._epoch:
                self.ended = message
            case EndEpoch():
                self.answer(message)
            case _:
                raise RuntimeError(f"the supervisor sent {type(message).__name__} in epoch {self._epoch}")

    def _note_stop(self, stop: Stop) -> None:
        if self.stop is None:
            self.stop, self._stopped_at = stop, time.monotonic()
