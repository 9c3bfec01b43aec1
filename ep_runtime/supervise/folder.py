"""The private folder of one server on one host: its sockets, and the configuration file of its frontend."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Self

LONGEST = 80
"""Bytes of the folder's path: a Unix socket's path, with its name, has at most 107."""


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


def check_private(path: Path) -> None:
    """Raise `FolderError` unless `path` is a folder of this user that nobody else may enter."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise FolderError(f"{path} is not a private folder of this user")


class RuntimeFolder:
    """The folder, made and held by the head's supervisor (or by a lone worker), and removed at the end.

    A lock says that its owner lives, so that what a killed server left behind is cleared and a second one is refused.
    """

    def __init__(self, path: Path | None) -> None:
        if path is None:
            path = Path(tempfile.mkdtemp(prefix="ep_runtime-"))
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
