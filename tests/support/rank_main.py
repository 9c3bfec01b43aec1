"""A long-lived rank process: imports torch once, then runs one function a job.

Started by the pool as `python -P -m tests.support.rank_main SOCKET_FD DUMP_FD PARENT_PID`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path

import torch

from tests.support.rank_context import RankContext
from tests.support.rank_wire import Hello, Job, Raised, Release, Returned, receive_in_rank, send

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """SIGKILL this process when the pool's process ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def run_job(job: Job, context: RankContext) -> Returned | Raised:
    """The function's value or exception. SystemExit counts as an exception here; os._exit and signals end the process."""
    try:
        module, _, name = job.function.partition(":")
        value = getattr(importlib.import_module(module), name)(context, **job.kwargs)
        return Returned(number=job.number, value=value)
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        return Raised(number=job.number, error=text, traceback=traceback.format_exc())


def serve(sock: socket.socket) -> None:
    """Jobs one after the other until the pool closes its end."""
    context: RankContext | None = None
    while True:
        message, fd = receive_in_rank(sock)
        if context is not None:
            context.close()
            context = None
            gc.collect()
        if message is None:
            return
        if isinstance(message, Release):
            continue
        context = RankContext(
            rank=message.rank,
            world=message.world,
            epoch=message.number,
            store_port=message.store_port,
            store_fd=fd,
            runtime_dir=Path(message.runtime_dir),
            kwargs=message.kwargs,
        )
        reply = run_job(message, context)
        context.leave()
        try:
            send(sock, reply)
        except TypeError as error:
            send(sock, Raised(number=message.number, error=f"TypeError: {error}", traceback=traceback.format_exc()))


def main() -> None:
    """Set up the process once, then serve."""
    fd, dump_fd, parent = (int(argument) for argument in sys.argv[1:4])
    die_with_parent(parent)
    for inherited in (fd, dump_fd):
        os.set_inheritable(inherited, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=dump_fd, all_threads=True)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    with socket.socket(fileno=fd) as sock:
        send(sock, Hello())
        serve(sock)


if __name__ == "__main__":
    main()
