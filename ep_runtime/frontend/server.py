"""The life of the HTTP process: listen, say when ready, drain on SIGTERM, end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from ep_runtime.frontend.api.errors import shutting_down
from ep_runtime.frontend.connection import connection_class
from ep_runtime.frontend.context import Frontend
from ep_runtime.frontend.listening import BACKLOG
from ep_runtime.frontend.metrics import EngineCollector

log = logging.getLogger(__name__)
CLOSE_SECONDS = 5
"""Time for answers that are written to reach their clients, once no sequence is left."""


class _Server(uvicorn.Server):
    """uvicorn's server, with signals left to us: it would stop listening at once, and draining must answer 503."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Take no signals."""
        yield


def adopt(descriptor: int) -> socket.socket:
    """The inherited listening socket behind `descriptor`; raises OSError when it is none.

    Whoever opened it keeps it open, so that clients who connect between two processes wait for the next one.
    """
    sock = socket.socket(fileno=descriptor)
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        raise OSError(errno.EINVAL, f"descriptor {descriptor} is no listening socket")
    sock.set_inheritable(False)
    return sock


async def serve(front: Frontend, app: ASGIApp, sock: socket.socket) -> None:
    """Run until SIGTERM or SIGINT has been served. A second signal ends the drain."""
    front.metrics.registry.register(EngineCollector(lambda: front.engine.stats))
    config = uvicorn.Config(
        app,
        http=connection_class(front.config.header_seconds, front.config.write_seconds),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    server = _Server(config)
    stop, stop_now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: stop_now.set() if stop.is_set() else stop.set())
    log.info("listening on http://%s:%d", *sock.getsockname()[:2])
    async with asyncio.TaskGroup() as group:
        background = [group.create_task(front.engine.run()), group.create_task(announce(front))]
        http = group.create_task(server.serve(sockets=[sock]))
        stopping = group.create_task(stop.wait())
        await asyncio.wait({http, stopping}, return_when=asyncio.FIRST_COMPLETED)
        front.draining = True
        await drain(front, stop_now)
        server.should_exit = True
        await http
        for task in [*background, stopping]:
            task.cancel()


async def announce(front: Frontend) -> None:
    """Print the one line that the supervisor waits for."""
    await front.engine.first_ready.wait()
    sys.stdout.write("ready\n")
    sys.stdout.flush()


async def drain(front: Frontend, stop_now: asyncio.Event) -> None:
    """Let running requests finish for the configured time; what is left then gets an error."""
    log.info("draining %d sequences for at most %g s", len(front.journal), front.config.drain_seconds)
    idle = asyncio.ensure_future(front.journal.idle())
    hurry = asyncio.ensure_future(stop_now.wait())
    await asyncio.wait({idle, hurry}, timeout=front.config.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    hurry.cancel()
    front.engine.fail_all(shutting_down())
