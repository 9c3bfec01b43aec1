"""Memory, descriptors and threads of every process of a server, once a second, by a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PERIOD_SECONDS = 1.0


@dataclass(slots=True)
class Series:
    """One process's samples while it had one role. `memory` is its proportional share (PSS) in bytes; all lists are alike long."""

    role: str
    pid: int
    seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)


def kind_of(process: psutil.Process) -> str:
    """What a process of a server runs; "" when it has ended and only waits to be collected."""
    command = " ".join(process.cmdline())
    for word, kind in (
        ("torch.distributed.run", "torchrun"),
        ("ep_runtime.frontend.main", "frontend"),
        ("ep_runtime.engine.main", "engine"),
        ("ep_runtime.serve", "supervisor"),
    ):
        if word in command:
            return kind
    return command[-40:]


def roles(root: psutil.Process) -> dict[psutil.Process, str]:
    """Every process from `root` down with its role. Of the engines below one supervisor the oldest runs; the others stand by."""
    found: dict[psutil.Process, str] = {}
    served: set[int] = set()
    for process in sorted([root, *root.children(recursive=True)], key=lambda one: one.create_time()):
        # A process that ends meanwhile has no more samples; a new one is looked at again in a second.
        with contextlib.suppress(psutil.Error):
            kind = kind_of(process)
            if kind == "supervisor":
                kind = f"supervisor {process.environ().get('RANK', '?')}"
            elif kind == "engine":
                rank = found.get(psutil.Process(process.ppid()), "supervisor ?").split()[-1]
                kind = f"standby {rank}" if process.ppid() in served else f"engine {rank}"
                served.add(process.ppid())
            if kind:
                found[process] = kind
    return found


def read_pss(pid: int) -> int:
    """Proportional set size in bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


class Sampler:
    """Samples the tree below `root` from `start()` to `stop()`."""

    def __init__(self, root: psutil.Process) -> None:
        self.series: dict[tuple[int, str], Series] = {}
        self._root = root
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> Sampler:
        """Begin."""
        self._thread.start()
        return self

    def stop(self) -> list[Series]:
        """End; what was sampled, in order of role and birth."""
        self._stop.set()
        self._thread.join()
        return sorted(self.series.values(), key=lambda one: (one.role, one.seconds[0]))

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            for process, role in roles(self._root).items():
                with contextlib.suppress(psutil.Error, OSError):
                    self._take(process, role)

    def _take(self, process: psutil.Process, role: str) -> None:
        memory, files, threads = read_pss(process.pid), process.num_fds(), process.num_threads()
        # A standby that becomes the engine begins a new life.
        one = self.series.setdefault((process.pid, role), Series(role, process.pid))
        one.seconds.append(time.monotonic() - self._began)
        one.memory.append(memory)
        one.files.append(files)
        one.threads.append(threads)
