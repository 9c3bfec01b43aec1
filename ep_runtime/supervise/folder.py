"""The private folder of one server on one host: its sockets, and the configuration file of its frontend."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Self

LONGEST = 80
"""Bytes of the folder's path: a Unix socket's path, with its name, has at most 107."""


SWEEP_SECONDS = 60.0
"""Age of a lock below which its owner may be about to take it."""
EPOCH_SOCKET = re.compile(r"(links|engine)-\d+")
"""What the head's engine makes for one epoch, and removes unless it is killed."""


class FolderError(Exception):
    """The folder cannot be used; the message says why."""


def job_folder(job: str, environ: dict[str, str]) -> Path:
    """Where all ranks of `job` on this host meet. The same for each of them, another for another job or user."""
    name = f"ep_runtime-{os.getuid()}-{hashlib.blake2b(job.encode(), digest_size=6).hexdigest()}"
    for base in (environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        path = Path(base) / name
        if path.is_absolute() and path.parent.is_dir() and len(os.fsencode(path)) <= LONGEST:
            return path
    raise FolderError("neither XDG_RUNTIME_DIR nor the temporary folder has a path short enough for sockets")


def lone_folder() -> Path:
    """A new folder for a server without a launcher, or a worker daemon, where a path is short enough for sockets."""
    for base in (tempfile.gettempdir(), "/tmp"):
        if os.path.isdir(base) and len(os.fsencode(base)) + len("/ep_runtime-12345678") <= LONGEST:
            return Path(tempfile.mkdtemp(prefix="ep_runtime-", dir=base))
    raise FolderError(f"the temporary folder {tempfile.gettempdir()} has a path too long for sockets")


def check_private(path: Path) -> None:
    """Raise `FolderError` unless `path` is a folder of this user that nobody else may enter."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise FolderError(f"{path} is not a private folder of this user")


def clear_epochs(path: Path) -> None:
    """Remove what the head's engines have left of the epochs before; none may be running."""
    for entry in path.iterdir():
        if EPOCH_SOCKET.fullmatch(entry.name):
            entry.unlink(missing_ok=True)


def sweep(parent: Path) -> None:
    """Remove the folders of killed servers of this user in `parent`: their lock is held by nobody, and old enough to have been."""
    for path in sorted(parent.glob("ep_runtime-*")):
        try:
            check_private(path)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except (OSError, FolderError):
            continue  # it belongs to somebody else, or is not one of these folders
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(lock).st_mtime > SWEEP_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue  # its server lives
        finally:
            os.close(lock)


class RuntimeFolder:
    """The folder, made and held by the head's supervisor (or by a lone worker), and removed at the end.

    A lock says that its owner lives, so that what killed servers left behind is cleared and a second one is refused.
    """

    def __init__(self, path: Path | None) -> None:
        if path is None:
            path = lone_folder()
        path.mkdir(mode=0o700, exist_ok=True)
        check_private(path)
        self.path = path
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise FolderError(f"another server of this job is running: it holds {path}") from None
        for left in path.iterdir():
            if left.name != "lock":
                left.unlink()
        os.utime(self._lock)
        sweep(path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
