"""Where the URL of an image says that it is: in the URL itself, on the web, or in the operator's folder."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes

from ep_runtime.frontend.vision.errors import MediaError

_DATA = re.compile(r"data:(?P<type>(?:image|video)/[a-z0-9.+-]{1,60});base64,", re.ASCII | re.IGNORECASE)
_HEAD = 100
"""Characters in which a data URI's data begin."""
_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]{0,30}):", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Source:
    """An encoded image or video. `media_type` is what a data URI calls it."""

    data: bytes
    base64: bool = False
    media_type: str | None = None


def scheme_of(url: str) -> str:
    """`data`, `http`, `https` or `file`; raises MediaError for anything else."""
    found = _SCHEME.match(url)
    if found is None:
        raise MediaError("has no URL: give data:image/...;base64,..., or one with http or https")
    scheme = found["scheme"].lower()
    if scheme not in ("data", "http", "https", "file"):
        raise MediaError(f"has a URL of the scheme {scheme!r}, which is not supported")
    return scheme


def data_source(url: str, most: int) -> Source:
    """The contents of a data URI, still in base64. `most` bytes may be in it. Raises MediaError."""
    found = _DATA.match(url[:_HEAD])
    if found is None:
        raise MediaError("has a data URI that is not of the form data:image/TYPE;base64,DATA")
    size = (len(url) - found.end()) * 3 // 4
    if size > most + 2:  # padding counts here
        raise MediaError(f"has {size} bytes; the server takes {most}")
    if size == 0:
        raise MediaError("has an empty data URI")
    try:
        data = url[found.end() :].encode("ascii")
    except UnicodeEncodeError:
        raise MediaError("is no base64: it has characters beyond ASCII") from None
    return Source(data, base64=True, media_type=found["type"].lower())


def file_source(url: str, folder: Path | None, most: int) -> Source:
    """A file below `folder`, wherever links lead. Blocks. Raises MediaError, the same for all that is not there or not below."""
    if folder is None:
        raise MediaError("is a local file, and the operator allows none")
    host, slash, path = url[len("file:") :].removeprefix("//").partition("/")
    if host not in ("", "localhost") or not slash or not url.lower().startswith("file://"):
        raise MediaError("is a local file, for which the URL is file:///PATH")
    root = os.fsencode(os.path.realpath(folder))
    name = unquote_to_bytes("/" + path.partition("?")[0].partition("#")[0])
    data = None if b"\0" in name else _read_below(root, name, most)
    if data is None:
        raise MediaError("is no file below the folder that the operator allows")
    if len(data) > most:
        raise MediaError(f"has more than {most} bytes")
    return Source(data)


def _read_below(root: bytes, name: bytes, most: int) -> bytes | None:
    """At most `most` + 1 bytes of a regular file; None when there is none, or when it lies elsewhere."""
    try:
        real = os.path.realpath(name, strict=True)
        if not _below(root, real):
            return None
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Between the two a folder on the way may have become a link: what counts is what was opened.
        opened = os.readlink(f"/proc/self/fd/{descriptor}".encode())
        if not _below(root, opened) or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(most + 1)
    finally:
        os.close(descriptor)


def _below(root: bytes, path: bytes) -> bool:
    return path.startswith(root.rstrip(b"/") + b"/")
