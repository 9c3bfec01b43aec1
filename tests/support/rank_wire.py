"""Messages between the rank pool and its processes: length-prefixed msgpack over a socket pair, plain data and numpy arrays."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec
import numpy as np

_LENGTH = struct.Struct("<Q")
_ARRAY = 1


class Job(msgspec.Struct, tag=True, frozen=True):
    """Run `function` ("module:name"). Rank 0 gets the store's listening socket beside this message."""

    number: int
    rank: int
    world: int
    store_port: int
    runtime_dir: str
    function: str
    kwargs: dict[str, Any]


class Release(msgspec.Struct, tag=True, frozen=True):
    """Every rank of the job has answered: what they share (the store) may go."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The process has imported torch and waits for jobs."""


class Returned(msgspec.Struct, tag=True, frozen=True):
    """The function's value."""

    number: int
    value: Any


class Raised(msgspec.Struct, tag=True, frozen=True):
    """The function's exception: "Type: message" and the traceback's text."""

    number: int
    error: str
    traceback: str


def _encode_other(value: object) -> object:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of objects is not plain data")
        header = msgspec.msgpack.encode((value.dtype.str, value.shape))
        return msgspec.msgpack.Ext(_ARRAY, _LENGTH.pack(len(header)) + header + np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not plain data; give a tensor as its .numpy()")


def _decode_array(code: int, data: memoryview) -> np.ndarray:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    dtype, shape = msgspec.msgpack.decode(data[_LENGTH.size : start])
    return np.frombuffer(data[start:], np.dtype(dtype)).reshape(shape).copy()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_TO_RANK = msgspec.msgpack.Decoder(Job | Release, ext_hook=_decode_array)
_FROM_RANK = msgspec.msgpack.Decoder(Hello | Returned | Raised, ext_hook=_decode_array)


def send(sock: socket.socket, message: Job | Release | Hello | Returned | Raised, fds: tuple[int, ...] = ()) -> None:
    """Send one message whole, with file descriptors beside its first bytes."""
    payload = _ENCODER.encode(message)
    head = _LENGTH.pack(len(payload))
    if fds:
        socket.send_fds(sock, [head], list(fds))
    else:
        sock.sendall(head)
    sock.sendall(payload)


def _receive(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return data


def receive_in_rank(sock: socket.socket) -> tuple[Job | Release | None, int | None]:
    """(the next message, the socket that came with it); (None, None) when the pool is gone."""
    head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 1)
    if len(head) < _LENGTH.size:
        return None, None
    body = _receive(sock, _LENGTH.unpack(head)[0])
    if body is None:
        return None, None
    return _TO_RANK.decode(body), fds[0] if fds else None


def receive_in_pool(sock: socket.socket) -> Hello | Returned | Raised | None:
    """The next message of a process; None when it is gone."""
    try:
        head = _receive(sock, _LENGTH.size)
        body = None if head is None else _receive(sock, _LENGTH.unpack(head)[0])
    except ConnectionResetError:
        return None
    return None if body is None else _FROM_RANK.decode(body)
