"""Real supervisors with fake children: their environment, their common output, and what must not be left of them."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.support.python_path import ROOT, python_path

FAKES = ROOT / "tests" / "unit" / "supervise" / "fakes"
WAIT_SECONDS = 60.0


def model_in(folder: Path) -> Path:
    """A folder that passes for a model."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def fake_environment(folder: Path, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every folder that a process may write to lies in `folder`: `run` is for sockets."""
    for name in ("run", "starts"):
        (folder / name).mkdir()
    runtime = str(folder / "run")
    base = {name: value for name, value in os.environ.items() if not name.startswith("EP_RUNTIME_")}
    own = {
        "PYTHONPATH": python_path(FAKES),
        "XDG_RUNTIME_DIR": runtime,
        "TMPDIR": runtime,
        "FAKE_STARTS": str(folder / "starts"),
        "OMP_NUM_THREADS": "1",
    }
    return base | own | dict(variables or {})


class Processes:
    """Processes that write to one pipe. `until` reads on; what it waits for comes after `at`, which `mark` moves to the end."""

    def __init__(self) -> None:
        read, self._write = os.pipe()
        self._read = os.fdopen(read, "rb", buffering=0)
        self.started: list[subprocess.Popen] = []
        self.output = ""
        self.at = 0

    def start(self, arguments: list[str], environment: Mapping[str, str]) -> subprocess.Popen:
        """A `fake_serve` process."""
        command = [sys.executable, "-P", "-m", "fake_serve", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=self._write, stderr=self._write, stdin=subprocess.DEVNULL)
        self.started.append(process)
        return process

    def until(self, pattern: str) -> re.Match[str]:
        """Read on until the output after the mark matches."""
        deadline = time.monotonic() + WAIT_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while (found := re.compile(pattern).search(self.output, self.at)) is None:
                if selector.select(0.5):
                    self.output += self._read.read(65536).decode()
                    continue
                in_time = time.monotonic() < deadline and any(process.poll() is None for process in self.started)
                assert in_time, f"no {pattern!r} after {self.at} in:\n{self.output}"
        return found

    def mark(self) -> None:
        """What was written until now no longer counts."""
        self.read_rest()
        self.at = len(self.output)

    def read_rest(self) -> str:
        """All that was written until now."""
        os.set_blocking(self._read.fileno(), False)
        while chunk := self._read.read(65536):
            self.output += chunk.decode()
        os.set_blocking(self._read.fileno(), True)
        return self.output

    def process(self, pattern: str) -> psutil.Process:
        """The process whose id is the pattern's first group."""
        return psutil.Process(int(self.until(pattern)[1]))

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.started:
            process.kill()
            process.wait()
        os.close(self._write)
        self._read.close()


def assert_gone(processes: list[psutil.Process]) -> None:
    """All of them have ended, or do so soon."""
    _, alive = psutil.wait_procs(processes, timeout=WAIT_SECONDS)
    assert alive == []
