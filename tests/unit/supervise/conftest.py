"""Worker daemons of which a test is the head, and whole servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.supervised_daemon import Head
from tests.support.supervised_server import Server


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Head]]:
    """`start(**variables)`: a daemon with these in its environment."""
    heads: list[Head] = []

    def begin(**variables: str) -> Head:
        heads.append(Head(tmp_path_factory.mktemp("d"), variables))
        return heads[-1]

    yield begin
    for head in heads:
        head.close()


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """`serve(world, *flags, **variables)`: a server's processes; they are killed after the test."""
    servers: list[Server] = []

    def start(world: int, *flags: str, **variables: str) -> Server:
        servers.append(Server(tmp_path_factory.mktemp("s"), world, flags, variables))
        return servers[-1]

    yield start
    for server in servers:
        server.processes.close()
