"""Waiting for a server that was started as a process, and ending it. Nothing of the demos' clients is needed for it."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
import urllib.error
import urllib.request

import psutil

READY_SECONDS = 600.0
END_SECONDS = 40.0
"""A server ends within 25 seconds."""


class DemoFailed(Exception):
    """The server did not come up or went away; the message says which."""


def wait_ready(server: subprocess.Popen[bytes], url: str) -> None:
    """Return when the server is ready; raises `DemoFailed` as soon as its process ends, or after `READY_SECONDS`."""
    deadline = time.monotonic() + READY_SECONDS
    pidfd = os.pidfd_open(server.pid)
    try:
        while time.monotonic() < deadline:
            if answers(url):
                return
            if select.select([pidfd], [], [], 0.25)[0]:
                raise DemoFailed(f"the server ended with status {server.wait()} before it was ready")
    finally:
        os.close(pidfd)
    raise DemoFailed(f"the server was not ready after {READY_SECONDS:g} s")


def answers(url: str) -> bool:
    """True when `url` gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=5.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def end(server: subprocess.Popen[bytes]) -> int:
    """Stop every rank in order, kill what is left, and return torchrun's exit status.

    The ranks are told, not torchrun: it would call its own signal an error.
    """
    for rank in psutil.Process(server.pid).children() if server.poll() is None else []:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.terminate()
    try:
        return server.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        for process in psutil.Process(server.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.kill()
        return server.wait()
