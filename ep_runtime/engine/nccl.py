"""Joining and leaving a group over NCCL, in a process that goes on when a peer is gone.

A collective whose peer is gone never ends by itself: its kernel waits on the device. Aborting the communicator ends it; what it
computed means nothing. The process, its weights and its other memory are not touched by that.
"""

from __future__ import annotations

import datetime
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from ep_runtime.engine.endable import endable

log = logging.getLogger(__name__)

# torch's type stubs leave out stores and process groups.
_torch: Any = distributed

ENVIRONMENT = {
    # A failed or late collective is ours to judge: torch's own watchdogs would end this process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Every connection is made while the group forms: one that is made by a later collective could wait on the host for a dead peer.
    "NCCL_RUNTIME_CONNECT": "0",
}
"""What torch and NCCL read when a group is made."""

LEAVE_SECONDS = 2.0
"""For an abort, and for the device to be done after it: half a second is usual. The coordinator gives an engine no longer."""

POLL_S = 1e-3


class DeviceStuckError(Exception):
    """The device does not finish what was launched: its memory cannot be freed or used, and the process has to end."""


class NcclGroup:
    """One epoch's group, connected. `group` has torch's collectives. `check` ends the joining, by raising."""

    def __init__(
        self, store: Callable[[], Any], *, rank: int, world: int, device: torch.device, timeout_s: float, check: Callable[[], None]
    ) -> None:
        self.group: Any = None
        self._device = device
        os.environ.update(ENVIRONMENT)
        joining = threading.Event()

        def join() -> None:
            try:
                self._join(store(), rank, world, timeout_s)
            finally:
                joining.set()

        try:
            endable(join, check, "joining a group")
        except BaseException:
            self.leave(joining.is_set)
            raise

    def leave(self, idle: Callable[[], bool] = lambda: True) -> None:
        """Abort what is in flight and drop the group; returns when the device is done and `idle()` holds. Idempotent.

        Raises:
            DeviceStuckError: that takes longer than LEAVE_SECONDS.
        """
        group, self.group = self.group, None
        aborting = threading.Thread(target=_abort, args=([group], self._device), name="aborting a group", daemon=True)
        del group
        aborting.start()
        deadline = time.monotonic() + LEAVE_SECONDS
        await_device(self._device, deadline)
        while aborting.is_alive() or not idle():
            _pause(deadline, "NCCL was aborted, and goes on")

    def _join(self, store: Any, rank: int, world: int, timeout_s: float) -> None:
        """Form the group, and run one collective: NCCL connects in the first."""
        torch.cuda.set_device(self._device)  # of this thread
        options = _torch.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        group = self.group = _torch.ProcessGroupNCCL(store, rank, world, options)
        mine = torch.zeros(1, device=self._device)
        group._allgather_base(torch.empty(world, device=self._device), mine).wait()
        torch.cuda.current_stream(self._device).synchronize()


def await_device(device: torch.device, deadline: float) -> None:
    """Return when all that was launched on this thread's stream is done; raises `DeviceStuckError` at `deadline` (monotonic)."""
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    while not done.query():
        _pause(deadline, f"{device} is not done")


def _pause(deadline: float, late: str) -> None:
    if time.monotonic() > deadline:
        raise DeviceStuckError(f"{late} after {LEAVE_SECONDS:g} s")
    time.sleep(POLL_S)


def _abort(held: list[Any], device: torch.device) -> None:
    """End the communicators of the group that `held` alone holds, if any, and drop it here, since that waits for its threads."""
    group = held.pop()
    if group is None:
        return
    torch.cuda.set_device(device)  # of this thread: another device would get a context by what is freed here
    try:
        group.abort()
    except RuntimeError as error:
        log.warning("abort of a group: %s", error)
