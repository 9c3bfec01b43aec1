"""Whole servers of real processes with fake engines: who ends when, with which status, and what is left behind."""

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

FAKES = Path(__file__).parent / "fakes"
WAIT_SECONDS = 60.0
RUNNING = "epoch 1 runs on"


class Server:
    """`world` serve processes as torchrun would start them; `until` reads their common output."""

    def __init__(self, folder: Path, world: int, *flags: str, variables: dict[str, str] | None = None) -> None:
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        runtime = folder / "run"
        runtime.mkdir()
        self.runtime = runtime
        self.output = ""
        read, self.write = os.pipe()
        self.read = os.fdopen(read, "rb", buffering=0)
        base = {name: value for name, value in os.environ.items() if not name.startswith("EP_RUNTIME_")}
        base |= {"PYTHONPATH": str(FAKES), "XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(runtime), **(variables or {})}
        self.ranks = [
            self.start([f"--model={model}", "--device=cpu", *flags], base | torchrun(rank, world)) for rank in range(world)
        ]
        self.base = base

    def start(self, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen:
        command = [sys.executable, "-P", "-m", "fake_serve", *arguments]
        return subprocess.Popen(command, env=environment, stdout=self.write, stderr=self.write, stdin=subprocess.DEVNULL)

    def until(self, pattern: str) -> re.Match:
        """Read on until the output matches."""
        deadline = time.monotonic() + WAIT_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self.read, selectors.EVENT_READ)
            while (found := re.search(pattern, self.output)) is None:
                if selector.select(0.5):
                    self.output += self.read.read(65536).decode()
                    continue
                in_time = time.monotonic() < deadline and self.ranks[0].poll() is None
                assert in_time, f"no {pattern!r} in:\n{self.output}"
        return found

    def engine(self, rank: int) -> psutil.Process:
        return psutil.Process(int(self.until(rf"fake engine {rank} pid (\d+)")[1]))

    def frontend(self) -> psutil.Process:
        return psutil.Process(int(self.until(r"fake frontend pid (\d+)")[1]))

    def statuses(self) -> list[int]:
        statuses = [process.wait(WAIT_SECONDS) for process in self.ranks]
        os.set_blocking(self.read.fileno(), False)
        while chunk := self.read.read(65536):
            self.output += chunk.decode()
        return statuses

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
        os.close(self.write)
        self.read.close()


def torchrun(rank: int, world: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank; none for a server of one without it."""
    if world == 1:
        return {}
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 29500}
    return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}


@pytest.fixture
def serve(tmp_path_factory):
    servers: list[Server] = []

    def start(world: int, *flags: str, **keywords) -> Server:
        servers.append(Server(tmp_path_factory.mktemp("s"), world, *flags, **keywords))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=WAIT_SECONDS)
    assert alive == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_every_rank_ends_everything_with_status_0(serve, number):
    server = serve(2)
    server.until(RUNNING)
    children = [server.engine(0), server.engine(1), server.frontend()]
    for process in server.ranks:  # torchrun passes its signal on to all of them
        process.send_signal(number)
    assert server.statuses() == [0, 0]
    assert_gone(children)
    assert list(server.runtime.iterdir()) == []
    assert "device 1" in server.output
    assert "resolved configuration" in server.output


def test_a_signal_to_one_worker_ends_the_server_in_order(serve):
    server = serve(2)
    server.until(RUNNING)
    server.ranks[1].send_signal(signal.SIGTERM)
    assert server.statuses() == [0, 0]
    assert "stopping (rank 1: SIGTERM)" in server.output


def test_a_world_of_one_needs_no_launcher(serve):
    server = serve(1)
    server.until("epoch 1 runs on 1 rank")
    server.ranks[0].send_signal(signal.SIGTERM)
    assert server.statuses() == [0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_engine_ends_the_server_and_is_named(serve, rank):
    server = serve(2)
    server.until(RUNNING)
    children = [server.engine(0), server.engine(1), server.frontend()]
    children[rank].kill()
    assert server.statuses()[0] == 1
    assert f"ep-runtime failed: rank {rank}: its engine ended: killed by SIGKILL" in server.output
    assert_gone(children)


def test_exit_0_without_stop_is_a_death(serve):
    server = serve(2, variables={"FAKE_ENGINE_1": "leaves"})
    assert server.statuses()[0] == 1
    assert "ep-runtime failed: rank 1: its engine ended: exit status 0" in server.output


def test_what_an_engine_reports_is_the_cause_that_is_named(serve):
    server = serve(2, variables={"FAKE_ENGINE_1": "reports"})
    assert server.statuses()[0] == 1
    assert "ep-runtime failed: rank 1: RuntimeError: the device is on fire" in server.output


def test_a_dead_frontend_ends_the_server(serve):
    server = serve(1, variables={"FAKE_FRONTEND": "dies"})
    assert server.statuses() == [1]
    assert "ep-runtime failed: the frontend ended: exit status 7" in server.output


def test_an_engine_that_ignores_everything_is_killed_in_time(serve):
    server = serve(2, variables={"FAKE_ENGINE_1": "deaf"})
    server.until(RUNNING)
    deaf = server.engine(1)
    began = time.monotonic()
    server.ranks[0].send_signal(signal.SIGTERM)
    assert server.statuses() == [0, 0]
    assert time.monotonic() - began < 25  # torchrun kills after 30
    assert_gone([deaf])
    assert "SIGKILL to its engine" in server.output


def test_a_load_that_takes_too_long_names_its_rank(serve):
    server = serve(2, "--load-timeout=3", variables={"FAKE_ENGINE_1": "load hangs"})
    assert server.statuses()[0] == 1
    assert "ep-runtime failed: load: nothing from rank 1 after 3 s" in server.output


@pytest.mark.parametrize("rank", [0, 1])
def test_children_die_with_a_killed_supervisor(serve, rank):
    server = serve(2)
    server.until(RUNNING)
    children = [server.engine(0), server.engine(1), server.frontend()]
    server.ranks[rank].kill()
    statuses = server.statuses()
    assert statuses[rank] == -signal.SIGKILL
    assert statuses[1 - rank] == 1
    assert_gone(children)


def test_a_daemon_joins_by_token_and_takes_the_heads_configuration(serve, tmp_path):
    port = free_port()
    token = "0123456789abcdef"
    flags = ("--world-size=2", "--coordinator-host=127.0.0.1", f"--coordinator-port={port}")
    server = serve(1, *flags, variables={"EP_RUNTIME_TOKEN": token})
    wrong = server.start(["--head", f"127.0.0.1:{port}"], server.base | {"EP_RUNTIME_TOKEN": token[::-1]})
    assert wrong.wait(WAIT_SECONDS) == 1
    server.until("refused by the head: the token is wrong")
    server.ranks.append(server.start(["--head", f"127.0.0.1:{port}"], server.base))
    server.until("epoch 1 runs on 2 ranks")
    server.ranks[0].send_signal(signal.SIGTERM)
    assert server.statuses() == [0, 0]
    assert token not in server.output


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
