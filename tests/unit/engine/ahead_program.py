"""Stands in for the process that compiles: its one kernel is the job's `device`, a class here, and is given its `folder`.

For the device "lists" it hangs before it compiles. It imports no torch.
"""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

from ep_runtime.engine.ahead.job import Variant
from ep_runtime.engine.ahead.pool import begin, compile_all, reply


class prints:
    """A kernel whose compiler prints."""

    @staticmethod
    def preload(data: str) -> SimpleNamespace:
        """Compiled."""
        print(f"ptxas says {data}", flush=True)
        return SimpleNamespace(hash="c0ffee")


class dies:
    """A kernel whose compiler takes the process with it."""

    @staticmethod
    def preload(data: str) -> None:
        """The end."""
        os._exit(3)


class kills:
    """A kernel whose compiler outlives the process that answers."""

    @staticmethod
    def preload(data: str) -> None:
        """End the parent, and wait for ever."""
        os.kill(os.getppid(), signal.SIGKILL)
        while True:
            signal.pause()


class hangs:
    """A kernel that is never compiled; whoever reads the pipe `data` sees it begin, and the process end."""

    @staticmethod
    def preload(data: str) -> None:
        """Wait for ever."""
        with open(data, "wb", buffering=0) as pipe:
            pipe.write(b"begun")
            while True:
                signal.pause()


def main() -> None:
    """Print, too, what is no answer."""
    job, answer = begin()
    print("no answer", flush=True)
    if job.device == "lists":
        hangs.preload(job.folder)
    variant = Variant(module="tests.unit.engine.ahead_program", name=job.device, data=job.folder)
    reply(answer, compile_all([variant] * job.max_slots, job.processes, id, answer))


if __name__ == "__main__":
    main()
