"""The head's listener: accepts the workers of one epoch, and nobody else."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from types import TracebackType

from protocol.address import LOCALHOST, bound_address, listen
from protocol.channel import Channel, Wait
from protocol.errors import EpFrameCorrupt, EpPeerGone
from protocol.hello import HELLO_SIZE, Reason, judge_hello, pack_answer, unpack_hello
from protocol.links import HeadLinks

HELLO_SECONDS = 2.0
"""A connection that has not said hello by then is refused."""
_MAX_WAITING = 256


class Listener:
    """A listening socket on this host alone unless `address` says otherwise (`unix:/path` or `host:port`)."""

    def __init__(self, address: str = LOCALHOST) -> None:
        self._sock = listen(address)
        self._sock.setblocking(False)
        self.address = bound_address(self._sock)
        self._path = self.address.removeprefix("unix:") if self.address.startswith("unix:") else None

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def accept(
        self,
        *,
        world: int,
        epoch: int,
        token: str,
        deadline: float | None,
        closed: Callable[[], bool],
        on_refused: Callable[[str], None],
        version: int = 2,
    ) -> HeadLinks:
        """Links to the `world - 1` workers of this epoch. `on_refused` gets a line for each connection that is turned away.

        Raises `EpDeadline` naming the missing ranks, and `EpPeerGone` when an accepted worker leaves before all are there.
        """
        door = _Door(self._sock, world, epoch, token, version, on_refused)
        wait = Wait(closed, deadline, door.missing)
        try:
            while len(door.accepted) < world - 1:
                door.step(wait.slice())
            return HeadLinks([door.accepted[rank] for rank in range(1, world)], epoch, closed)
        except BaseException:
            for channel in door.accepted.values():
                channel.close()
            raise
        finally:
            door.close_waiting()

    def close(self) -> None:
        """Stop listening; idempotent. A Unix socket's file is removed."""
        self._sock.close()
        if self._path is not None:
            path, self._path = self._path, None
            with suppress(FileNotFoundError):  # who ends the server may have removed its folder
                os.unlink(path)


class _Door:
    """Connections of one `accept`: those waiting to say hello (descriptor -> channel, expiry), and those accepted, by rank."""

    def __init__(
        self, sock: socket.socket, world: int, epoch: int, token: str, version: int, on_refused: Callable[[str], None]
    ) -> None:
        self._sock = sock
        self._world, self._epoch, self._token, self._version = world, epoch, token, version
        self._on_refused = on_refused
        self._waiting: dict[int, tuple[Channel, float]] = {}
        self.accepted: dict[int, Channel] = {}
        self._poller = select.poll()
        self._poller.register(sock.fileno(), select.POLLIN)

    def missing(self) -> str:
        """Words the ranks that have not come."""
        ranks = ", ".join(str(rank) for rank in range(1, self._world) if rank not in self.accepted)
        return f"rank {ranks} to connect for epoch {self._epoch}"

    def step(self, milliseconds: int) -> None:
        """One poll: take new connections, read hellos, notice who left."""
        for fd, _ in self._poller.poll(milliseconds):
            if fd == self._sock.fileno():
                self._take()
            elif fd in self._waiting:
                self._read(fd)
            else:
                self._watch(fd)
        now = monotonic()
        for fd in [fd for fd, (_, expires) in self._waiting.items() if expires < now]:
            self._refuse(fd, Reason.MALFORMED, f"no hello within {HELLO_SECONDS:g} s")

    def close_waiting(self) -> None:
        """Close the connections that have not said hello."""
        for channel, _ in self._waiting.values():
            channel.close()

    def _take(self) -> None:
        try:
            sock, where = self._sock.accept()
        except (BlockingIOError, ConnectionError):
            return
        channel = Channel(sock, f"connection from {where or 'this host'}")
        if len(self._waiting) >= _MAX_WAITING:
            # The one that has been silent longest makes room: a worker says hello at once, however many strangers stay.
            self._refuse(next(iter(self._waiting)), Reason.MALFORMED, f"more than {_MAX_WAITING} connections wait to say hello")
        self._waiting[channel.fd] = (channel, monotonic() + HELLO_SECONDS)
        self._poller.register(channel.fd, select.POLLIN)

    def _read(self, fd: int) -> None:
        channel, _ = self._waiting[fd]
        channel.fill()
        if len(channel.buffer) < HELLO_SIZE:
            if channel.eof:
                self._refuse(fd, Reason.MALFORMED, "closed before its hello")
            return
        try:
            hello = unpack_hello(channel.take(HELLO_SIZE))
        except EpFrameCorrupt as fault:
            self._refuse(fd, Reason.MALFORMED, str(fault))
            return
        taken = frozenset(self.accepted)
        reason = judge_hello(hello, version=self._version, epoch=self._epoch, token=self._token, world=self._world, taken=taken)
        if reason is not Reason.ACCEPTED:
            self._refuse(fd, reason, f"rank {hello.rank}, epoch {hello.epoch} (this one is {self._epoch}), frames {hello.version}")
            return
        del self._waiting[fd]
        channel.peer = f"rank {hello.rank}"
        self.accepted[hello.rank] = channel
        channel.send_some(pack_answer(reason))

    def _watch(self, fd: int) -> None:
        """An accepted worker sends its handshake early, or is gone."""
        channel = next(channel for channel in self.accepted.values() if channel.fd == fd)
        channel.fill()
        if channel.eof:
            raise EpPeerGone(f"{channel.gone()}, while the epoch was waiting for {self.missing()}")

    def _refuse(self, fd: int, reason: Reason, text: str) -> None:
        channel, _ = self._waiting.pop(fd)
        self._poller.unregister(fd)
        self._on_refused(f"{channel.peer} refused ({reason.name}): {text}")
        try:
            channel.send_some(pack_answer(reason))
        except EpPeerGone as gone:
            self._on_refused(str(gone))
        channel.close()
