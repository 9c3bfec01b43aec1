"""A worker daemon in a process of its own, with a fake engine, and the test as its head."""

from __future__ import annotations

import select
import socket
import time
from pathlib import Path

import psutil

from ep_runtime.config import RuntimeConfig
from protocol.message_socket import MessageSocket
from protocol.messages import BeginEpoch, Join, Loaded, Message, Progress, Ready, ToCoordinator, Welcome
from tests.support.supervised import WAIT_SECONDS, Processes, fake_environment, model_in

TOKEN = "0123456789abcdef"
BEGIN = BeginEpoch(epoch=3, world=2, store="s:1", links="l:1")


class Head:
    """The coordinator's side, played by the test, and the daemon."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.model = model_in(folder)
        self.runtime = folder / "run"
        self.output = Processes()
        self.environment = fake_environment(folder, {"EP_RUNTIME_TOKEN": TOKEN} | variables)
        self.daemon = self.output.start(["--head", self.address], self.environment)
        self.link: MessageSocket | None = None

    def listen_again(self) -> None:
        host, port = self.address.split(":")
        self.listener = socket.create_server((host, int(port)))

    def accept(self) -> Join:
        """Take the daemon's next connection, with its JOIN."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not select.select([self.listener], [], [], 0.5)[0]:
            in_time = time.monotonic() < deadline and self.daemon.poll() is None
            assert in_time, f"no connection:\n{self.output.read_rest()}"
        sock, _ = self.listener.accept()
        if self.link is not None:
            self.link.close()
        self.link = MessageSocket(sock, ToCoordinator, peer="the daemon")
        return self.receive(Join)

    def send(self, message: Message) -> None:
        assert self.link is not None
        self.link.send(message, timeout=WAIT_SECONDS)

    def receive(self, kind: type[Message]) -> Message:
        """The next message but Progress, which must be of this kind."""
        assert self.link is not None
        while True:
            message = self.link.recv(timeout=WAIT_SECONDS)
            if isinstance(message, kind):
                return message
            assert isinstance(message, Progress), message

    def welcome(self, **changes: object) -> None:
        """Answer JOIN."""
        settings = {"model": str(self.model), "device": "cpu", "threads": 1} | changes
        self.send(Welcome(rank=1, world=2, config=RuntimeConfig(**settings).to_json()))

    def load(self, **changes: object) -> Loaded:
        """Join, welcome, load."""
        self.accept()
        self.welcome(**changes)
        return self.receive(Loaded)

    def begin(self) -> None:
        self.send(BEGIN)
        assert self.receive(Ready) == Ready(epoch=3, rank=1)

    def engine(self) -> psutil.Process:
        return self.output.process(r"fake engine 1 pid (\d+)")

    def standby(self) -> psutil.Process:
        """The second process of this rank."""
        return self.output.process(r"fake process \d+ waits[^$]*?fake process (\d+) waits")

    def drop(self) -> None:
        assert self.link is not None
        self.link.close()

    def end(self) -> int:
        status = self.daemon.wait(WAIT_SECONDS)
        self.output.read_rest()
        return status

    def close(self) -> None:
        self.output.close()
        if self.link is not None:
            self.link.close()
        self.listener.close()
