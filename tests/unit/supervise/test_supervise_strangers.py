"""Strangers at the address where ranks join, as fuzzing found them: they neither keep a rank out nor get memory."""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.ports import free_port
from tests.support.supervised import WAIT_SECONDS, Processes, fake_environment, model_in

TOKEN = "0123456789abcdef"


class Head:
    """A head that waits for its second rank, which is to come over TCP."""

    def __init__(self, folder: Path) -> None:
        self.address = ("127.0.0.1", free_port())
        self.processes = Processes()
        self.environment = fake_environment(folder, {"EP_RUNTIME_TOKEN": TOKEN})
        flags = [f"--coordinator-host={self.address[0]}", f"--coordinator-port={self.address[1]}", "--world-size=2"]
        self.process = self.processes.start([f"--model={model_in(folder)}", "--device=cpu", "--port=0", *flags], self.environment)
        self.processes.until(r"fake engine 0 pid (\d+)")

    def strangers(self, count: int, stay: ExitStack) -> list[socket.socket]:
        return [stay.enter_context(socket.create_connection(self.address, timeout=WAIT_SECONDS)) for _ in range(count)]

    def join_and_end(self) -> None:
        """A worker gets in, and all end in order."""
        worker = self.processes.start(["--head", "{}:{}".format(*self.address)], self.environment)
        self.processes.until("epoch 1 runs on 2 ranks")
        self.process.send_signal(signal.SIGTERM)
        assert [self.process.wait(WAIT_SECONDS), worker.wait(WAIT_SECONDS)] == [0, 0]


@pytest.fixture
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    made = Head(tmp_path_factory.mktemp("s"))
    yield made
    made.processes.close()


def test_silent_strangers_do_not_keep_a_rank_out(head: Head) -> None:
    with ExitStack() as stay:
        head.strangers(150, stay)
        head.join_and_end()
    assert "64 others wait to join" in head.processes.read_rest()
    assert "no JOIN within" not in head.processes.output  # nobody had to wait until a stranger's time was over


def test_a_stranger_gets_no_memory(head: Head) -> None:
    before = psutil.Process(head.process.pid).memory_info().rss
    with ExitStack() as stay:
        for sock in head.strangers(40, stay):
            with suppress(ConnectionError):
                sock.sendall(struct.pack("<II", 1 << 26, 0) + bytes(2 << 20))
        assert psutil.Process(head.process.pid).memory_info().rss - before < 32 << 20
        head.join_and_end()
