"""One client's visit over a bare socket, and what its answers may be."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
from typing import Any

from tests.fuzz.requests import Visit

BOUND_SECONDS = 20.0
"""Longest time without a byte from the server; its own limits in these runs are a few seconds each."""
ALLOWED = {200, 400, 404, 405, 408, 413, 415, 429, 431, 503}
BUSY = {"grammar_busy", "queue_full"}
"""Codes of a 503 or 429 that an innocent server may give."""
BROKEN = {"output_error", "engine_error"}
_STATUS = re.compile(rb"(?:^|\n)HTTP/1\.[01] (\d{3})")
_RESET = struct.pack("ii", 1, 0)


class Wrong(AssertionError):
    """An answer that a sound server does not give."""


def converse(url: str, visit: Visit) -> bytes:
    """Everything that the server said."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=BOUND_SECONDS) as sock:
        with contextlib.suppress(ConnectionError):  # it may refuse in the middle of a request
            for piece in visit.pieces:
                sock.sendall(piece)
        if visit.end == "glance":
            with contextlib.suppress(ConnectionError):
                sock.recv(100)
        if visit.end in ("reset", "glance"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if visit.end in ("reset", "glance", "close"):
            return b""
        if visit.end == "half":
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        return _read(sock, first_only=visit.end == "read")


def _read(sock: socket.socket, first_only: bool) -> bytes:
    """All that comes; with `first_only` no more than one whole answer of a known length."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(1 << 16):
            data += piece
            if first_only and _whole(data):
                break
    return data


def _whole(data: bytes) -> bool:
    head, blank, body = data.partition(b"\r\n\r\n")
    if not blank or head.startswith(b"HTTP/1.1 1"):
        return False
    if b"transfer-encoding: chunked" in head.lower():
        return body.endswith(b"0\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return length is not None and len(body) >= int(length[1])


def dechunk(body: bytes) -> bytes:
    """A chunked body's content."""
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        out, body = out + body[:length], body[length + 2 :]
    return out


def check_answer(visit: Visit, data: bytes) -> None:
    """Raise Wrong unless `data` are answers that this visit may get."""
    statuses = [int(status) for status in _STATUS.findall(data)]
    strange = [status for status in statuses if status not in ALLOWED and status >= 200]
    if strange:
        raise Wrong(f"status {strange}")
    if visit.end != "read" or not _whole(data):
        if visit.strict and visit.end == "read":
            raise Wrong(f"no whole answer: {data[:300]!r}")
        return
    head, _, body = data.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        body = dechunk(body)
    elif length := re.search(rb"content-length: (\d+)", head.lower()):
        body = body[: int(length[1])]
    status = statuses[0]
    if b"text/event-stream" in head:
        _check_stream(body)
    elif b"application/json" in head:
        check_error(status, json.loads(body))
    if visit.strict and status != 200 and status not in (429, 503):
        raise Wrong(f"a good request got {status}")


def check_error(status: int, answer: Any) -> None:
    """An error has the one format, and no code that says that the server is broken."""
    if status == 200:
        return
    error = answer["error"]
    if set(error) != {"message", "type", "param", "code"} or not isinstance(error["message"], str):
        raise Wrong(f"error of another format: {answer}")
    if error["code"] in BROKEN or (status in (429, 503) and error["code"] not in BUSY):
        raise Wrong(f"{status} with code {error['code']}: {error['message']}")


def _check_stream(body: bytes) -> None:
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    if not events:
        raise Wrong("an empty stream")
    *chunks, last = events
    for chunk in chunks:
        found = json.loads(chunk)
        if "error" in found and found["error"]["code"] in BROKEN:
            raise Wrong(f"the stream ended with {found}")
    if last != b"[DONE]" and "error" not in json.loads(last):
        raise Wrong(f"the stream ended with {last!r}")
