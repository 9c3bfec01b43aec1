"""The HTTP socket. The server opens it once and hands it to each of its frontends; a frontend alone opens its own."""

from __future__ import annotations

import socket

BACKLOG = 2048


def listen_http(host: str, port: int) -> socket.socket:
    """A listening socket, IPv4 or IPv6 by the address; connections wait in its backlog until a frontend takes them.

    Raises OSError, also for a name that does not resolve.
    """
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock
