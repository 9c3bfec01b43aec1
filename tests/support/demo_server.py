"""The whole server as a user starts it: torchrun, ranks on the CPU, the demo model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from ep_runtime.demo.server import wait_ready
from tests.support.ports import free_port

END_SECONDS = 60.0


class DemoServer:
    """torchrun and everything below it; ready when the constructor returns. `flags` are the server's."""

    def __init__(self, folder: Path, ranks: int, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "log"
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "ep_runtime.serve"]
        with self._log.open("wb") as log:
            self.torchrun = subprocess.Popen(
                [sys.executable, *command, "--device=cpu", f"--port={self.port}", *flags],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        try:
            wait_ready(self.torchrun, f"{self.url}/ready")
        except BaseException:
            self.close()
            print(self.log())
            raise
        self.processes = psutil.Process(self.torchrun.pid).children(recursive=True)

    def log(self) -> str:
        """What every process has written."""
        return self._log.read_text()

    def ranks(self) -> list[psutil.Process]:
        """The processes that torchrun started, by rank."""
        return sorted(psutil.Process(self.torchrun.pid).children(), key=lambda process: int(process.environ()["RANK"]))

    def engine(self, rank: int) -> psutil.Process:
        """The engine below this rank: the oldest, until it has been replaced, since another may stand by."""
        below = self.ranks()[rank].children(recursive=True)
        engines = [process for process in below if "ep_runtime.engine.main" in process.cmdline()]
        return min(engines, key=lambda process: process.create_time())

    def close(self) -> None:
        """End what is left."""
        if self.torchrun.poll() is None:
            self.torchrun.send_signal(signal.SIGTERM)
        self.torchrun.wait(END_SECONDS)
