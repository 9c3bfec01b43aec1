"""A pool of long-lived rank processes, so that a distributed test costs milliseconds and not a torch import a rank.

Each job is an epoch of its own: a fresh store, a fresh directory, fresh groups. A process that dies or outlives its deadline is
reported and replaced; the others stay.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.python_path import ROOT, python_path
from tests.support.rank_wire import Hello, Job, Raised, Release, Returned, receive_in_pool, send

_START_DEADLINE = 120.0
_DUMP_QUIET = 0.3
_LOG_TAIL = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one rank's part of a job ended. `kind` is "returned", "raised", "died" or "hung"; `detail` is text for a person."""

    rank: int
    kind: str
    value: Any = None
    detail: str = ""


class RanksFailed(AssertionError):
    """Some rank did not return; the message has every such rank's traceback, last words or stack dump."""

    def __init__(self, function: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        bad = [outcome for outcome in outcomes if outcome.kind != "returned"]
        summary = ", ".join(f"rank {outcome.rank} {outcome.kind}" for outcome in bad)
        super().__init__("\n".join([f"{function}: {summary}", *(f"--- rank {one.rank} {one.kind}\n{one.detail}" for one in bad)]))


class RankProcess:
    """One child process, its socket, the pipe of its stack dumps, and the file of its output."""

    def __init__(self, number: int, log_dir: Path) -> None:
        self.sock, theirs = socket.socketpair()
        self.dump, dump_write = os.pipe()
        self.log_path = log_dir / f"rank{number}.log"
        environment = os.environ | {
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            # What a rank prints is in its log before its answer comes.
            "PYTHONUNBUFFERED": "1",
            # Gloo otherwise looks up the host's name, which need not resolve to an address of this machine.
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-P", "-m", "tests.support.rank_main", str(theirs.fileno()), str(dump_write), str(os.getpid())]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), dump_write),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
        theirs.close()
        os.close(dump_write)
        self._pidfd = os.pidfd_open(self.process.pid)
        self._log_start = 0
        self.ready = False

    def wait_ready(self) -> None:
        """Wait for the import of torch."""
        if self.ready:
            return
        self.sock.settimeout(_START_DEADLINE)
        if not isinstance(receive_in_pool(self.sock), Hello):
            raise RuntimeError(f"a rank process did not start (ended: {self.has_ended()})\n{self.last_words()}")
        self.ready = True
        self.sock.settimeout(None)

    def has_ended(self, timeout: float = 0.0) -> bool:
        """Whether the process ends within `timeout` seconds. It is not reaped."""
        return bool(select.select([self._pidfd], [], [], timeout)[0])

    def mark_log(self) -> None:
        """From here on, `last_words` are of the present job."""
        self._log_start = self.log_path.stat().st_size

    def last_words(self) -> str:
        """The end of what the process printed during the job."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read()[-_LOG_TAIL:].decode(errors="replace")

    def stacks(self) -> str:
        """The stacks of all threads, as faulthandler writes them on SIGUSR1; works while the process is stuck in C code."""
        self.process.send_signal(signal.SIGUSR1)
        pieces: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self.dump, selectors.EVENT_READ)
            while selector.select(_DUMP_QUIET if pieces else 4 * _DUMP_QUIET):
                piece = os.read(self.dump, 1 << 16)
                if not piece:
                    break
                pieces.append(piece)
        return b"".join(pieces).decode(errors="replace") or "no stack dump: the process is stopped"

    def end(self, *, kill: bool) -> int:
        """End the process (closing its socket asks it to) and wait for it, then end what it started; its exit status."""
        self.sock.close()
        if not kill:
            self.has_ended(timeout=10)
        # Not reaped yet, so its number still names its own group.
        os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self.dump)
        status = self.process.wait()
        os.close(self._pidfd)
        return status


class RankPool:
    """Up to `size` rank processes, spawned when a job first needs them. Rank r of a job is process r."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._dir = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._processes: list[RankProcess] = []
        self._jobs = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process and remove the pool's files."""
        self._end_all(kill=False)
        shutil.rmtree(self._dir)

    def _end_all(self, *, kill: bool) -> None:
        for process in self._processes:
            process.end(kill=kill or not process.ready)
        self._processes.clear()

    @property
    def pids(self) -> list[int]:
        """Process ids of the spawned ranks."""
        return [process.process.pid for process in self._processes]

    def run(self, world: int, function: str, *, deadline: float = 120.0, grace: float = 5.0, **kwargs: Any) -> list[Any]:
        """Every rank's value of `function(context, **kwargs)`, given as "module:name". RanksFailed unless every rank returns.

        Once a rank has failed, the others have `grace` seconds left: they are usually waiting for it in a collective.
        """
        outcomes = self.outcomes(world, function, deadline=deadline, grace=grace, **kwargs)
        if any(outcome.kind != "returned" for outcome in outcomes):
            raise RanksFailed(function, outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, world: int, function: str, *, deadline: float = 120.0, grace: float | None = None, **kwargs: Any
    ) -> list[Outcome]:
        """How each rank's part ended, whatever that was: for tests in which ranks are meant to fail.

        Without `grace`, ranks that outlive a failed one have until the deadline.
        """
        if not 1 <= world <= self.size:
            raise ValueError(f"world {world} is not in 1..{self.size}")
        self._spawn(world)
        ranks = self._processes[:world]
        with self._job_dir() as runtime_dir:
            try:
                self._send_jobs(ranks, function, kwargs, runtime_dir)
                outcomes = self._collect(ranks, deadline, grace)
            except BaseException:
                # Ranks in the middle of a job would answer the next one.
                self._end_all(kill=True)
                raise
        for rank, outcome in enumerate(outcomes):
            if outcome.kind in ("died", "hung"):
                self._processes[rank] = RankProcess(rank, self._dir)
            else:
                # A process that was killed between its answer and now is found dead, and replaced, by the next job.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    send(ranks[rank].sock, Release())
        return outcomes

    @contextlib.contextmanager
    def _job_dir(self) -> Iterator[Path]:
        self._jobs += 1
        path = self._dir / str(self._jobs)
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path)

    def _spawn(self, world: int) -> None:
        for rank, process in enumerate(self._processes):
            if process.has_ended():
                process.end(kill=True)
                self._processes[rank] = RankProcess(rank, self._dir)
        while len(self._processes) < world:
            self._processes.append(RankProcess(len(self._processes), self._dir))
        for process in self._processes[:world]:
            process.wait_ready()

    def _send_jobs(self, ranks: list[RankProcess], function: str, kwargs: dict[str, Any], runtime_dir: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as store:
            for rank, process in enumerate(ranks):
                process.mark_log()
                job = Job(
                    number=self._jobs,
                    rank=rank,
                    world=len(ranks),
                    store_port=store.getsockname()[1],
                    runtime_dir=str(runtime_dir),
                    function=function,
                    kwargs=kwargs,
                )
                send(process.sock, job, (store.fileno(),) if rank == 0 else ())

    def _collect(self, ranks: list[RankProcess], deadline: float, grace: float | None) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        end = time.monotonic() + deadline
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(ranks):
                selector.register(process.sock, selectors.EVENT_READ, rank)
            while len(found) < len(ranks):
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    found[key.data] = self._answer(key.data, ranks[key.data])
                    if grace is not None and found[key.data].kind != "returned":
                        end = min(end, time.monotonic() + grace)
        late = [rank for rank in range(len(ranks)) if rank not in found]
        # All stacks before the first kill, which would wake the others with an error.
        stacks = {rank: ranks[rank].stacks() for rank in late}
        for rank in late:
            words = ranks[rank].last_words()
            ranks[rank].end(kill=True)
            found[rank] = Outcome(rank=rank, kind="hung", detail=f"{stacks[rank]}\n{words}")
        return [found[rank] for rank in range(len(ranks))]

    def _answer(self, rank: int, process: RankProcess) -> Outcome:
        message = receive_in_pool(process.sock)
        if message is None:
            words = process.last_words()
            status = process.end(kill=False)
            cause = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            return Outcome(rank=rank, kind="died", value=status, detail=f"{cause}\n{words}")
        if isinstance(message, Returned) and message.number == self._jobs:
            return Outcome(rank=rank, kind="returned", value=message.value)
        if isinstance(message, Raised) and message.number == self._jobs:
            return Outcome(rank=rank, kind="raised", value=message.error, detail=f"{message.traceback}\n{process.last_words()}")
        raise RuntimeError(f"rank {rank} answered {message} to job {self._jobs}")
