"""The head's ZeroMQ inbox among garbage (no ZeroMQ, broken messages, many parts): the good messages all come, in order."""

from __future__ import annotations

import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic

import zmq

from ep_runtime.engine.port import ZmqPort
from protocol.codec import decode, encode
from protocol.errors import EpFrameCorrupt
from protocol.messages import Abort, Message, ToEngine
from tests.fuzz.decoders import message_bytes
from tests.fuzz.values import mutate_bytes

LONG = 15.0
GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(48)
"""The first 64 bytes of a ZMTP 3 connection."""


@contextmanager
def open_port() -> Iterator[tuple[ZmqPort, zmq.Socket[bytes], str]]:
    """A port, a frontend's socket to it, and the path of its Unix socket."""
    with tempfile.TemporaryDirectory(prefix="ep-") as folder, zmq.Context() as context, context.socket(zmq.PUSH) as push:
        port = ZmqPort(Path(folder), 1)
        push.set(zmq.LINGER, 0)
        push.connect(f"ipc://{folder}/engine-1")
        yield port, push, f"{folder}/engine-1"
        port.close()


def strange(rng: random.Random, path: str) -> None:
    """Somebody who does not speak ZeroMQ, or not for long."""
    with socket.socket(socket.AF_UNIX) as sock, suppress(OSError):
        sock.settimeout(LONG)
        sock.connect(path)
        sock.sendall(rng.choice([rng.randbytes(300), mutate_bytes(rng, GREETING), GREETING, b"GET / HTTP/1.1\r\n\r\n"]))


def is_good(data: bytes) -> bool:
    """Whether the table knows it: what is broken at random may still be whole."""
    try:
        decode(ToEngine, data)
    except EpFrameCorrupt:
        return False
    return True


def case(rng: random.Random) -> None:
    """Fifty messages through one port."""
    with open_port() as (port, push, path):
        expected = []
        for _ in range(50):
            if rng.random() < 0.1:
                strange(rng, path)
            parts = [message_bytes(rng, ToEngine) for _ in range(rng.choice([1, 1, 1, 3]))]
            push.send_multipart(parts)
            expected += [encode(decode(ToEngine, part)) for part in parts if is_good(part)]
        last = encode(Abort(request_ids=["the last one"]))
        push.send(last)
        found: list[bytes] = []
        until = monotonic() + LONG
        while found[-1:] != [last]:
            assert monotonic() < until, "the last message did not come"
            found += [encode(message) for message in port.receive(0.5) if isinstance(message, Message)]
        assert found == [*expected, last]
