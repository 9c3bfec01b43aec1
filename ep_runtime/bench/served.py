"""A server of real ranks for benchmarks that break it: started by torchrun, its engines found, killed and waited for."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from ep_runtime.bench.demo_http import free_port
from ep_runtime.demo.server import end, wait_ready

ENGINE = "ep_runtime.engine.main"
QUIET_SECONDS = 0.5
SETTLE_SECONDS = 120.0
REQUEST_SECONDS = 600.0


class Served:
    """torchrun with `ranks` ranks; ready when the constructor returns. `flags` are the server's; `log` takes what it prints."""

    def __init__(self, ranks: int, flags: Sequence[str], log: Path) -> None:
        self.ranks = ranks
        self.port = free_port()
        command = ["--nproc-per-node", str(ranks), "-m", "ep_runtime.serve", "--port", str(self.port), *flags]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", *command],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_ready(self._process, f"http://127.0.0.1:{self.port}/ready")
        except BaseException:
            self.close()
            raise

    def engines(self, rank: int) -> list[psutil.Process]:
        """The engine processes below a rank, the oldest first: that one serves, another one is its standby."""
        tops = psutil.Process(self._process.pid).children()
        top = next(process for process in tops if process.environ().get("RANK") == str(rank))
        return sorted((child for child in top.children() if ENGINE in child.cmdline()), key=psutil.Process.create_time)

    def kill(self, ranks: Sequence[int]) -> float:
        """SIGKILL to the engines of these ranks; the `perf_counter` time before."""
        engines = [self.engines(rank)[0] for rank in ranks]
        at = time.perf_counter()
        for engine in engines:
            engine.send_signal(signal.SIGKILL)
        return at

    def settle(self, standby: bool) -> None:
        """Wait until no engine computes any more, and with `standby` every rank has a second one."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            seen = [self.engines(rank) for rank in range(self.ranks)]
            if all(len(engines) == (2 if standby else 1) for engines in seen):
                waiting = [engines[-1] for engines in seen]
                before = [sum(engine.cpu_times()[:2]) for engine in waiting]
                time.sleep(QUIET_SECONDS)
                after = [sum(engine.cpu_times()[:2]) for engine in waiting]
                if all(now - then < 0.2 * QUIET_SECONDS for then, now in zip(before, after, strict=True)):
                    return
            time.sleep(QUIET_SECONDS)
        raise RuntimeError(f"the engines did not come to rest within {SETTLE_SECONDS:g} s")

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS)
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read().decode()
        connection.close()
        return response.status, body

    def metrics(self) -> dict[str, float]:
        """Every metric by its name with labels."""
        lines = [line for line in self.get("/metrics")[1].splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one completion that is not streamed."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def stream(self, body: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """(perf_counter time, choice) of every chunk of a streamed completion. Raises RuntimeError for an error in it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS)
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            at = time.perf_counter()
            text = line.decode().strip()
            if text.startswith("{") or '"error"' in text[:20]:
                raise RuntimeError(f"the server answered {text}")
            if text.startswith("data: {"):
                for choice in json.loads(text.removeprefix("data: "))["choices"]:
                    yield at, choice
        connection.close()

    def close(self) -> None:
        """End every rank in order."""
        end(self._process)
