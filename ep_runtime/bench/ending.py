"""How what a benchmark has started ends: with it, however it ends itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

GRACE_SECONDS = 60.0
"""For torchrun to end its ranks, which it kills after 30 s, and for a child to end its server, which has 40 s."""


def end_what_was_started() -> None:
    """SIGTERM ends this process by an exception, so that ranks and servers that it has started in sessions of their own end, too.

    Further ones must not cut that short: `timeout` sends two, to its child and to the group. A rank under torchrun starts none: it
    dies at once, whatever it waits for.
    """

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    if "RANK" not in os.environ:
        signal.signal(signal.SIGTERM, end)


def ended(process: subprocess.Popen[bytes], limit: float | None = None) -> int | None:
    """The exit status; None for a process that was ended because it took longer than `limit` seconds.

    It ends with whoever waits here, too, by SIGTERM, on which torchrun ends its ranks: SIGKILL would leave them behind.
    """
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
