"""Child processes: started by module name, watched by pidfd, ended by SIGTERM and then SIGKILL to their whole group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ep_runtime.supervise.child import NO_PAGE


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: an exit status, or the signal that killed it."""

    status: int | None = None
    signal: int | None = None

    @property
    def clean(self) -> bool:
        """True for exit status 0."""
        return self.status == 0

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by {signal.Signals(self.signal).name}"
        return f"exit status {self.status}"


class Child:
    """One child in a session of its own, so that a signal to its process group reaches whatever it started.

    `pidfd` becomes readable the moment the child ends; then `reap` gives its exit. `progress_fd` is the descriptor of a progress
    page, on which the child says that it runs. Raises `OSError` when the system gives no process.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        progress_fd: int | None = None,
        stdout: int | None = None,
    ) -> None:
        first = [str(os.getpid()), NO_PAGE if progress_fd is None else str(progress_fd)]
        command = [sys.executable, "-P", "-m", "ep_runtime.supervise.child", *first, module, *arguments]
        self.name = name
        self.exit: Exit | None = None
        self._popen = subprocess.Popen(  # no preexec_fn: between fork and exec runs no code of ours
            command,
            env=None if environment is None else dict(environment),
            pass_fds=(*pass_fds, *(() if progress_fd is None else (progress_fd,))),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
        )
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)

    @property
    def alive(self) -> bool:
        """True until `reap` has seen the end."""
        return self.exit is None

    @property
    def running(self) -> bool:
        """False once it has ended, reaped or not."""
        return self.exit is None and os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def send(self, number: signal.Signals) -> None:
        """Signal the child and everything it started; nothing happens when they are gone."""
        if self.exit is None:  # reaping frees the pid: only until then is the group surely the child's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def reap(self) -> Exit:
        """Kill what the child left behind in its group, collect its exit and free its pid. Waits if the child still runs."""
        if self.exit is None:
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            code = self._popen.wait()
            os.close(self.pidfd)
            self.exit = Exit(signal=-code) if code < 0 else Exit(status=code)
        return self.exit
