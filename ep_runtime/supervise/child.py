"""The first module of every child process: ties its life to its parent's, then runs the module it was started for.

Used as `python -P -m ep_runtime.supervise.child PARENT_PID PROGRESS_FD MODULE ARGUMENT...`. Setting the parent-death signal here,
in the child, needs no code between fork and exec. PROGRESS_FD is the descriptor of a progress page, or `-` for none: its first move
says that this process runs, before the module begins to import what it needs.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h. The signal comes when the parent's *thread* that forked ends, so children are started by the main thread."""

NO_PAGE = "-"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; exits at once when it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit(f"the parent {parent} ended before its child began")


def note_begin(descriptor: int) -> None:
    """The first move on the progress page."""
    from protocol.progress import Phase, ProgressPage

    ProgressPage.open(descriptor).enter(Phase.STARTING)


def main() -> None:
    """Run `MODULE` as `__main__` with its own arguments."""
    parent, progress, module = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    die_with_parent(parent)
    if progress != NO_PAGE:
        note_begin(int(progress))
    sys.argv[:] = [module, *sys.argv[4:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
