"""Whole servers of real processes with fake children."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil

from tests.support.supervised import WAIT_SECONDS, Processes, assert_gone, fake_environment, model_in

RUNNING = r"epoch (\d+) runs on"


class Server:
    """`world` serve processes as torchrun would start them."""

    def __init__(self, folder: Path, world: int, flags: tuple[str, ...], variables: dict[str, str] | None) -> None:
        self.runtime = folder / "run"
        self.processes = Processes()
        self.until, self.mark = self.processes.until, self.processes.mark
        self.environment = fake_environment(folder, variables)
        self.arguments = [f"--model={model_in(folder)}", "--device=cpu", "--port=0", *flags]
        self.world = world
        self.ranks = [self.start_rank(rank) for rank in range(world)]

    def start_rank(self, rank: int) -> subprocess.Popen:
        return self.processes.start(self.arguments, self.environment | torchrun(rank, self.world))

    def start_daemon(self, address: str, **variables: str) -> subprocess.Popen:
        return self.processes.start(["--head", address], self.environment | variables)

    @property
    def output(self) -> str:
        return self.processes.read_rest()

    def engine(self, rank: int) -> psutil.Process:
        return self.processes.process(rf"fake engine {rank} pid (\d+)")

    def standby(self, *engines: psutil.Process) -> psutil.Process:
        """A process that waits and is none of these engines."""
        others = "|".join(str(engine.pid) for engine in engines)
        return self.processes.process(rf"fake process (?!(?:{others}) )(\d+) waits")

    def frontend(self) -> psutil.Process:
        return self.processes.process(r"fake frontend pid (\d+)")

    def running(self) -> int:
        """Wait until an epoch runs; its number."""
        return int(self.until(RUNNING)[1])

    def statuses(self) -> list[int]:
        return [process.wait(WAIT_SECONDS) for process in self.ranks]

    def stop(self) -> list[int]:
        """SIGTERM to every rank, as torchrun does; their statuses."""
        for process in self.ranks:
            process.send_signal(signal.SIGTERM)
        return self.statuses()

    def assert_over(self, *processes: psutil.Process) -> None:
        """Neither a process nor a file is left."""
        assert_gone([*processes])
        assert list(self.runtime.iterdir()) == []


def torchrun(rank: int, world: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank; none for a server of one without it."""
    if world == 1:
        return {}
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 29500}
    return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}
