"""Addresses of links as text: `unix:/path`, or `host:port` (`[::1]:port` for IPv6)."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable

from protocol.channel import SLICE_MS, Wait
from protocol.errors import EpPeerGone

LOCALHOST = "127.0.0.1:0"
"""The default of every listener: this host alone, any free port."""
_BACKLOG = 128
_NOT_YET = (errno.ECONNREFUSED, errno.ENOENT, errno.EAGAIN, errno.ETIMEDOUT, errno.EHOSTUNREACH)


def split_host_port(address: str) -> tuple[str, int]:
    """`host:port` in two parts; raises `ValueError` on anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address is {address!r}, expected unix:/path or host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listen(address: str) -> socket.socket:
    """A listening socket. A Unix socket's file is readable by its user alone, and must not exist before."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(path)
            os.chmod(path, 0o600)
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
        return sock
    host, port = split_host_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def bound_address(sock: socket.socket) -> str:
    """The text address of a listening socket, with the port that it was given."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    return f"[{name[0]}]:{name[1]}" if sock.family == socket.AF_INET6 else f"{name[0]}:{name[1]}"


def connect(address: str, deadline: float | None, closed: Callable[[], bool], *, tries_again: bool = True) -> socket.socket:
    """A connected, non-blocking socket; `deadline` in `time.monotonic()` seconds, None for no end.

    A listener that is not there yet is tried again until then if `tries_again`, else `EpPeerGone` says so. A host name is resolved
    once, by the system, without a deadline.
    """
    family, target = _resolve(address)
    wait = Wait(closed, deadline, lambda: f"a listener at {address}")
    pause = select.poll()
    while True:
        budget = wait.slice()
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            fault = _finish(sock, sock.connect_ex(target), wait)
        except BaseException:
            sock.close()
            raise
        if fault == 0:
            return sock
        sock.close()
        if fault not in _NOT_YET or not tries_again:
            raise EpPeerGone(f"cannot connect to {address}: {os.strerror(fault)}")
        pause.poll(min(budget, SLICE_MS))


def _resolve(address: str) -> tuple[int, str | tuple]:
    if address.startswith("unix:"):
        return socket.AF_UNIX, address.removeprefix("unix:")
    host, port = split_host_port(address)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as fault:
        raise EpPeerGone(f"cannot resolve {address}: {fault}") from fault
    return family, target


def _finish(sock: socket.socket, fault: int, wait: Wait) -> int:
    """The errno of a connection attempt, 0 when connected, once it is known."""
    if fault != errno.EINPROGRESS:
        return fault
    poller = select.poll()
    poller.register(sock.fileno(), select.POLLOUT)
    while not poller.poll(wait.slice()):
        pass
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
