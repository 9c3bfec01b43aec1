"""A server of real processes, as torchrun would start them, whose engines a test can kill, stop and break at chosen moments."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from ep_runtime.supervise.folder import job_folder
from tests.support import chaos_engine
from tests.support.ports import free_port
from tests.support.python_path import python_path

WAIT_SECONDS = 120.0
POLL_SECONDS = 0.005
ENGINE = "tests.support.chaos_engine"
FRONTEND = "ep_runtime.frontend.main"


class ChaosServer:
    """`world` ranks below `folder`; ready when the constructor returns. `flags` are the server's own."""

    def __init__(self, folder: Path, world: int, model: Path, *flags: str) -> None:
        self.world = world
        self.model = model
        self.folder = folder
        self.runtime = Path(tempfile.mkdtemp(prefix="ep-"))  # a socket's path has at most 107 bytes
        self.faults = folder / "faults"
        self.faults.mkdir()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_SECONDS, trust_env=False)
        self._events = Events(self.faults / "events")
        self._log = folder / "log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EP_RUNTIME_")}
        environment |= {
            "PYTHONPATH": python_path(),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "TMPDIR": str(self.runtime),
            "OMP_NUM_THREADS": "1",
            "CHAOS_DIR": str(self.faults),
        }
        ranks = [environment | launcher(rank, world, self.port) for rank in range(world)]
        self.runtime_folder = job_folder(f"chaos-{self.port}", ranks[0])
        command = [sys.executable, "-P", "-m", "tests.support.chaos_serve", "--device=cpu", f"--port={self.port}"]
        command += [f"--model={model}", "--served-model-name=tiny", *flags]
        with self._log.open("wb") as log:
            self.ranks = [
                subprocess.Popen(command, env=variables, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                for variables in ranks
            ]
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise

    # What is seen

    def log(self) -> str:
        """What every process has written."""
        return self._log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Every metric with its labels as they are written."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def epoch(self) -> int:
        """The newest epoch that the frontend knows; 0 while it does not answer."""
        try:
            return int(self.metrics().get("ep_epoch", 0))
        except httpx.TransportError:
            return 0

    def wait(self, what: str, holds: Callable[[], Any]) -> Any:
        """Look until it holds; what the server does is seen from outside alone."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := holds()):
            ended = [rank for rank, process in enumerate(self.ranks) if process.poll() is not None]
            assert not ended, f"serve of ranks {ended} has ended while waiting for {what}\n{self.log()[-6000:]}"
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{self.log()[-6000:]}"
            time.sleep(POLL_SECONDS)
        return found

    def wait_ready(self) -> None:
        """Return when /ready says 200."""
        self.wait("/ready", self.is_ready)

    def wait_epoch(self, epoch: int) -> None:
        """Return when the frontend serves this epoch; AssertionError once it knows of a later one, which never comes back."""
        self.wait(f"epoch {epoch}", lambda: self.epoch() >= epoch and self.is_ready())
        assert self.epoch() == epoch, self.log()[-6000:]

    def is_ready(self) -> bool:
        """Whether /ready says 200; not while nobody answers."""
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def engine(self, rank: int) -> int:
        """The pid of this rank's engine: the process that began to load last."""
        return self._events.newest("loading", rank)["pid"]

    def stood(self, rank: int, number: int) -> int:
        """The pid of this rank's last process that has imported everything; waits until there have been `number`, the first engine
        among them.
        """
        self._events.wait("stands", rank, number - 1)
        return self._events.newest("stands", rank)["pid"]

    def frontend(self) -> psutil.Process:
        """The process that serves HTTP."""
        return next(child for child in psutil.Process(self.ranks[0].pid).children() if FRONTEND in child.cmdline())

    def engines_alive(self) -> list[int]:
        """Every process that was an engine of this server and still runs."""
        return [pid for pid in self._events.pids() if psutil.pid_exists(pid)]

    def processes(self) -> list[psutil.Process]:
        """Every process of the server."""
        return [process for rank in self.ranks for process in family(rank.pid)]

    # What is done to it

    def happened(self, kind: str, *ranks: int) -> int:
        """How often one of these ranks has told `kind`."""
        return sum(self._events.count(kind, rank) for rank in ranks)

    def arm(self, kind: str, *ranks: int, **arguments: Any) -> None:
        """Have the engines of these ranks meet a fault of `chaos_engine`; `expect` waits for it, `happened` counts it."""
        for rank in ranks:
            chaos_engine.arm(self.faults, kind, rank, arguments)

    def disarm(self, kind: str, *ranks: int) -> None:
        """Take armed faults back."""
        for rank in ranks:
            (self.faults / f"{kind}-{rank}").unlink(missing_ok=True)

    @contextmanager
    def expect(self, kind: str, *ranks: int) -> Iterator[None]:
        """Leave the block when each of these ranks has told `kind` since it was entered."""
        before = {rank: self._events.count(kind, rank) for rank in ranks}
        yield
        for rank in ranks:
            self._events.wait(kind, rank, before[rank])

    def kill(self, *ranks: int) -> float:
        """SIGKILL to the engines of these ranks; the monotonic time before."""
        engines = [self.engine(rank) for rank in ranks]
        at = time.monotonic()
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        return at

    def stop(self, rank: int) -> float:
        """SIGSTOP to the engine of this rank; the monotonic time before."""
        at = time.monotonic()
        os.kill(self.engine(rank), signal.SIGSTOP)
        return at

    def go_on(self, rank: int) -> None:
        """SIGCONT to the engine of this rank."""
        os.kill(self.engine(rank), signal.SIGCONT)

    def stop_supervisor(self, rank: int) -> float:
        """SIGSTOP to what torchrun would have started for this rank; the monotonic time before."""
        at = time.monotonic()
        self.ranks[rank].send_signal(signal.SIGSTOP)
        return at

    def terminate(self) -> None:
        """SIGTERM to every rank, as torchrun sends it."""
        for process in self.ranks:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # a test that failed may have left it stopped

    def end(self) -> list[int]:
        """An ordered end of every rank; their exit statuses."""
        self.terminate()
        return [process.wait(WAIT_SECONDS) for process in self.ranks]

    def close(self) -> None:
        """End whatever is left, without order."""
        for process in self.ranks:
            process.kill()
            process.wait()
        self.http.close()
        self._events.close()
        shutil.rmtree(self.runtime)


class Events:
    """What the engines tell, taken in by a thread."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._seen: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while data := self._socket.recv(65536):
            with self._changed:
                self._seen.append(json.loads(data))
                self._changed.notify_all()

    def _of(self, what: str, rank: int) -> list[dict[str, Any]]:
        return [event for event in self._seen if event["what"] == what and event["rank"] == rank]

    def count(self, what: str, rank: int) -> int:
        """How often this rank has told it."""
        with self._changed:
            return len(self._of(what, rank))

    def newest(self, what: str, rank: int) -> dict[str, Any]:
        """The last time that this rank told it."""
        with self._changed:
            return self._of(what, rank)[-1]

    def pids(self) -> list[int]:
        """Every process that has told anything."""
        with self._changed:
            return sorted({event["pid"] for event in self._seen})

    def wait(self, what: str, rank: int, before: int) -> None:
        """Return when this rank has told it more than `before` times."""
        with self._changed:
            told = self._changed.wait_for(lambda: len(self._of(what, rank)) > before, WAIT_SECONDS)
            assert told, f"rank {rank} never came to {what}; told were {[(e['what'], e['rank']) for e in self._seen]}"

    def close(self) -> None:
        """End the thread."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", self._socket.getsockname())
        self._thread.join(10)
        self._socket.close()


def assert_nothing_leaks(server: ChaosServer) -> None:
    """Every slot and block of the running epoch is free, and nobody waits.

    What ends has its slot until the last step that names it is read, and the engine reports at least once a second: all gauges are
    waited for together, since one report may say that nothing runs, and the next one that everything is free.
    """
    server.wait("an engine that holds nothing", lambda: held(server.metrics()) == {})
    metrics = server.metrics()
    assert metrics["ep_total_slots"] > 0
    assert metrics["ep_total_blocks"] > 0


def held(metrics: dict[str, float]) -> dict[str, float]:
    """What sequences hold, by its name, as far as it is not 0; "engine" while no engine has reported."""
    if "ep_total_slots" not in metrics:
        return {"engine": 1.0}
    counts = {f"ep_{name}_sequences": metrics[f"ep_{name}_sequences"] for name in ("running", "waiting", "journal")}
    counts |= {name: metrics[f"ep_total_{name}"] - metrics[f"ep_free_{name}"] for name in ("slots", "blocks")}
    return {name: count for name, count in counts.items() if count}


def launcher(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank of a job that is named after the HTTP port."""
    values = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {name: str(value) for name, value in values.items()} | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "chaos"}


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it; nothing when it is gone."""
    if not psutil.pid_exists(pid):
        return []
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]
