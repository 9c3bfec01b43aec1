"""The servers of the chaos tests: one of four ranks for most of them, and what every one of them must be like afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.chaos_model import make_served_checkpoint
from tests.support.chaos_server import ChaosServer


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`served(family, variant)`: the folder of a tiny checkpoint with a tokenizer, written once."""
    root = tmp_path_factory.mktemp("served")
    made: dict[str, Path] = {}

    def make(family: str, variant: str) -> Path:
        name = f"{family}-{variant}"
        if name not in made:
            made[name] = make_served_checkpoint(family, variant, root / name)
        return made[name]

    return make


@pytest.fixture
def serve(served: Callable[[str, str], Path], tmp_path: Path) -> Iterator[Callable[..., ChaosServer]]:
    """`serve(family, variant, world, *flags)`: a server; after the test it is ended in order and leaves nothing behind."""
    servers: list[ChaosServer] = []

    def start(family: str, variant: str, world: int, *flags: str) -> ChaosServer:
        folder = tmp_path / f"server{len(servers)}"
        folder.mkdir()
        servers.append(ChaosServer(folder, world, served(family, variant), *flags))
        return servers[-1]

    yield start
    try:
        for server in servers:
            assert_ends_clean(server)
    finally:
        for server in servers:
            server.close()


def assert_ends_clean(server: ChaosServer) -> None:
    """SIGTERM gives status 0 on every rank, and no process or file is left."""
    processes = server.processes()
    assert server.end() == [0] * server.world, server.log()[-6000:]
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []
    assert server.engines_alive() == []
    assert not server.runtime_folder.exists()
    assert list(server.runtime.iterdir()) == []
