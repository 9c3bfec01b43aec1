"""The real frontend process on a free loopback port, for tests that talk HTTP to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support.python_path import python_path

LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")


def frontend_command(config: Path, before: str = "") -> list[str]:
    """How a supervisor starts the frontend; with code that runs `before` it in the same process, for tests that break it."""
    module = "ep_runtime.frontend.main"
    start = ["-c", f"{before}\nimport runpy\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)"]
    return [sys.executable, "-P", "-W", "error", *(start if before else ["-m", module]), "--config-json", str(config)]


def frontend_environment() -> dict[str, str]:
    """The source tree need not be installed, and -P keeps the working directory off sys.path."""
    return {**os.environ, "PYTHONPATH": python_path()}


class FrontendProcess:
    """`python -P -m ep_runtime.frontend.main` with a config file; `url` is known when the constructor returns.

    A `listen_fd` is inherited.
    """

    def __init__(self, folder: Path, before: str = "", **config: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "frontend.json"
        path.write_text(json.dumps({"port": 0, "runtime_dir": str(folder), **config}))
        self.process = subprocess.Popen(
            frontend_command(path, before),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=frontend_environment(),
            pass_fds=[config["listen_fd"]] if "listen_fd" in config else [],
        )
        self._seen = threading.Condition()
        self._lines: dict[str, list[str]] = {"out": [], "err": []}
        self._ended = 0
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()
        found = LISTENING.search(self.wait_line("err", "listening on"))
        assert found is not None
        self.url = found[1]

    def _read(self, name: str, stream: Any) -> None:
        with stream:
            for line in stream:
                with self._seen:
                    self._lines[name].append(line.rstrip("\n"))
                    self._seen.notify_all()
        with self._seen:
            self._ended += 1
            self._seen.notify_all()

    def wait_line(self, name: str, text: str, timeout: float = 60) -> str:
        """The first line of stdout ("out") or stderr ("err") that holds `text`."""

        def find() -> str | bool:
            return next((line for line in self._lines[name] if text in line), "") or self._ended == 2

        with self._seen:
            found = self._seen.wait_for(find, timeout)
        assert isinstance(found, str), f"no line with {text!r}; stderr:\n" + "\n".join(self._lines["err"])
        return found

    @property
    def out(self) -> list[str]:
        """Lines of stdout so far."""
        return list(self._lines["out"])

    @property
    def err(self) -> list[str]:
        """Lines of stderr so far."""
        return list(self._lines["err"])

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 30) -> int:
        """Exit status."""
        return self.process.wait(timeout)

    def close(self) -> None:
        """Kill if still alive, and take in the pipes' last lines."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(10)
