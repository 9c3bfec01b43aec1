"""A supervisor's link to the coordinator: joins, and where it can connect again, does so for as long as it is allowed to.

```
        +--------------------- pause --------------------+
        v                                                |
   connecting (in a thread) -> joining -> welcomed -> lost, or refused for now
                                  |
                                  +-> refused for good: given up
```
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from ep_runtime.supervise.backoff import connect_pause
from ep_runtime.supervise.loop import Loop, Timer
from protocol.errors import EpLinkLost
from protocol.message_socket import MessageSocket
from protocol.messages import Join, Message, Refused, ToSupervisor, Welcome

log = logging.getLogger(__name__)

SEND_SECONDS = 5.0
DEAD_PEER_SECONDS = 15
"""A peer whose host answers no packet for so long is gone: no end of stream comes from a cut cable."""


class HeadLink:
    """`on_message` gets everything but refusals, Welcome first. `on_lost` is called when a welcomed link ends and another will be
    made, `on_given_up` once, when none will.

    With `sock` alone there is one connection. `connect` makes another: it is called in a thread, makes one try, and raises
    `EpLinkLost` or `OSError` for one that may be repeated. `patience`: seconds without a Welcome that are borne, None for ever.
    """

    def __init__(
        self,
        loop: Loop,
        join: Join,
        *,
        sock: socket.socket | None,
        connect: Callable[[], socket.socket] | None,
        patience: float | None,
        on_message: Callable[[ToSupervisor], None],
        on_lost: Callable[[str], None],
        on_given_up: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._join = join
        self._sock = sock
        self._connect = connect
        self._patience = patience
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_given_up = on_given_up
        self._link: MessageSocket | None = None
        self._wish: int | None = None
        """The rank that a daemon had, whose weights it holds; it asks for it once."""
        self._tries = 0
        self._told = ""
        self._had_head = False
        self._alone_since = time.monotonic()
        self._timer: Timer | None = None
        self._closed = False
        self.welcomed = False

    def start(self) -> None:
        """Ask to take part."""
        self._alone_since = time.monotonic()
        if self._sock is not None:
            self._open(self._sock)
        else:
            self._try()

    def send(self, message: Message) -> None:
        """Send to the head; without one nothing happens."""
        if self._link is None:
            return
        try:
            self._link.send(message, timeout=SEND_SECONDS)
        except EpLinkLost as error:
            self._ended(str(error))
        self._loop.later(0.0, self._readable)  # a send that had to wait has read meanwhile, which wakes nobody

    def close(self) -> None:
        """Leave, and try no more; idempotent."""
        self._closed = True
        self.welcomed = False
        self._set_timer(None)
        self._drop()

    # Connecting

    def _try(self) -> None:
        connect = self._connect
        assert connect is not None

        def work() -> None:
            try:
                result: socket.socket | Exception = connect()
            except Exception as error:  # whatever it is: the loop's thread judges it
                result = error
            self._loop.call_from_thread(lambda: self._tried(result))

        # resolving a name can take long and cannot be interrupted; a daemon thread does not hold the process's end up
        threading.Thread(target=work, name="connect", daemon=True).start()

    def _tried(self, result: socket.socket | Exception) -> None:
        if isinstance(result, socket.socket):
            if self._closed:
                result.close()
            else:
                self._open(result)
        elif isinstance(result, EpLinkLost | OSError):
            # Ranks start in any order: that a head has not come up yet is nothing wrong.
            self._again(str(result), logging.WARNING if self._had_head else logging.INFO)
        else:
            self._give_up(str(result))

    def _open(self, sock: socket.socket) -> None:
        if sock.family != socket.AF_UNIX:
            notice_dead_peer(sock)
        self._link = MessageSocket(sock, ToSupervisor, peer="the head")
        self._loop.watch(self._link.fileno(), self._readable)
        if self._patience is not None:  # a head that has not come to it yet, or hangs
            left = max(0.0, self._alone_since + self._patience - time.monotonic())
            self._set_timer(self._loop.later(left, lambda: self._ended("no answer to JOIN")))
        self.send(self._join if self._wish is None else msgspec.structs.replace(self._join, rank=self._wish))

    def _readable(self) -> None:
        link = self._link
        while link is not None and link is self._link:
            try:
                messages = link.ready()
            except EpLinkLost as error:
                self._ended(str(error))
                return
            if not messages:
                return
            for message in messages:
                if link is self._link:
                    self._take(message)

    def _take(self, message: ToSupervisor) -> None:
        match message:
            case Refused():
                self._refused(message)
                return
            case Welcome(rank):
                self._set_timer(None)
                self._tries, self._told, self.welcomed, self._had_head = 0, "", True, True
                if self._join.rank is None:
                    self._wish = rank
        self._on_message(message)

    # Endings

    def _refused(self, refused: Refused) -> None:
        self._drop()
        wished, self._wish = self._wish is not None, None
        if wished or refused.again:
            self._again(f"refused by the head: {refused.reason}")
        else:
            self._give_up(f"refused by the head: {refused.reason}")

    def _ended(self, error: str) -> None:
        """The connection is of no more use."""
        if self._link is None:
            return
        self._drop()
        if self.welcomed and self._connect is not None:
            self.welcomed = False
            self._alone_since = time.monotonic()
            self._on_lost(error)
        self._again(error)

    def _again(self, reason: str, level: int = logging.WARNING) -> None:
        if self._closed:
            return
        alone = time.monotonic() - self._alone_since
        if self._connect is None:
            self._give_up(f"lost the head: {reason}")
        elif self._patience is not None and alone >= self._patience:
            self._give_up(f"no head for {alone:.0f} s: {reason}")
        else:
            self._tries += 1
            log.log(logging.DEBUG if reason == self._told else level, "no head yet (%s); trying again", reason)
            self._told = reason
            self._set_timer(self._loop.later(connect_pause(self._tries), self._try))

    def _give_up(self, cause: str) -> None:
        if not self._closed:
            self.close()
            self._on_given_up(cause)

    def _drop(self) -> None:
        if self._link is not None:
            self._loop.forget(self._link.fileno())
            self._link.close()
            self._link = None

    def _set_timer(self, timer: Timer | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


def notice_dead_peer(sock: socket.socket) -> None:
    """Have the kernel end a TCP connection whose other host has gone silent, whether data is under way or not."""
    third = DEAD_PEER_SECONDS // 3
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, third)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, third)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_SECONDS * 1000)
