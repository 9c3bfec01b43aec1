"""The first module of every child process: ties its life to its parent's, then runs the module it was started for.

Used as `python -P -m ep_runtime.supervise.child PARENT_PID MODULE ARGUMENT...`. Setting the parent-death signal here, in the
child, needs no code between fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h. The signal comes when the parent's *thread* that forked ends, so children are started by the main thread."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; exits at once when it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit(f"the parent {parent} ended before its child began")


def main() -> None:
    """Run `MODULE` as `__main__` with its own arguments."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent)
    sys.argv[:] = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
