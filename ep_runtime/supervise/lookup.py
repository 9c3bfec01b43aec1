"""Finds a model's folder without holding the loop up: fetching it can take minutes, building the demo seconds."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from ep_runtime.supervise.loop import Loop
from ep_runtime.supervise.process import Child
from ep_runtime.supervise.source import Found, ModelNotFound, at_hand, model_folder

log = logging.getLogger(__name__)


class Lookup:
    """One search; exactly one of `on_found` and `on_missing` is called, unless it is cancelled before. A folder is found at once.

    What must be made or fetched is a child's work: only a process can be ended in the middle of a download, and its Python does
    not share this one's lock.
    """

    def __init__(self, loop: Loop, reference: str, on_found: Callable[[Path], None], on_missing: Callable[[str], None]) -> None:
        self._loop = loop
        self._reference = reference
        self._on_found = on_found
        self._on_missing = on_missing
        self._child: Child | None = None
        self._answer = -1
        self._cancelled = False

    def start(self) -> None:
        """Begin."""
        if at_hand(self._reference):
            try:
                found = Found(folder=str(model_folder(self._reference)))
            except ModelNotFound as error:
                found = Found(error=str(error))
            self._finish(found)
            return
        self._answer, theirs = os.pipe()
        try:
            self._child = Child("lookup", "ep_runtime.supervise.source", [self._reference, str(theirs)], pass_fds=[theirs])
        except OSError as error:
            os.close(self._answer)
            self._finish(Found(error=f"model: no process to look for it: {error}"))
            return
        finally:
            os.close(theirs)
        self._loop.watch(self._child.pidfd, self._ended)

    def cancel(self) -> None:
        """Nobody is called any more; a child is killed."""
        self._cancelled = True
        if self._child is not None:
            self._child.send(signal.SIGKILL)

    def _ended(self) -> None:
        assert self._child is not None
        self._loop.forget(self._child.pidfd)
        how = self._child.reap()
        with os.fdopen(self._answer, "rb") as pipe:
            data = pipe.read()
        self._finish(msgspec.json.decode(data, type=Found) if how.clean else Found(error=f"model: the search for it ended: {how}"))

    def _finish(self, found: Found) -> None:
        if self._cancelled:
            return
        if found.folder:
            self._on_found(Path(found.folder))
        else:
            self._on_missing(found.error)
