"""The first exchange on a link, before anything is believed: who connects, and the answer. Fixed structs, little-endian.

Hello, 52 bytes: magic `EPHI` | version u16 | frame version u16 | epoch u32 | rank u32 | sha256 of the shared token, 32 bytes |
crc32 of the 48 bytes before it u32. Answer, 12 bytes: magic `EPHO` | version u16 | reason u16 | crc32 of the 8 bytes before it u32.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

from protocol.errors import EpFrameCorrupt

HELLO_VERSION = 1
_HELLO = struct.Struct("<4sHHII32s")
_ANSWER = struct.Struct("<4sHH")
_CHECKSUM = struct.Struct("<I")
_HELLO_MAGIC = b"EPHI"
_ANSWER_MAGIC = b"EPHO"

HELLO_SIZE = _HELLO.size + _CHECKSUM.size
ANSWER_SIZE = _ANSWER.size + _CHECKSUM.size


class Reason(IntEnum):
    """Why a hello is refused; ACCEPTED when it is not."""

    ACCEPTED = 0
    MALFORMED = 1
    TOKEN = 2
    EPOCH = 3
    RANK = 4
    TAKEN = 5
    VERSION = 6


class Hello(NamedTuple):
    """Who connects. `version` is the frame version that it will speak."""

    version: int
    epoch: int
    rank: int
    token_hash: bytes


def token_hash(token: str) -> bytes:
    """What stands for the shared token on the wire, 32 bytes."""
    return hashlib.sha256(b"ep_runtime link\0" + token.encode()).digest()


def pack_hello(hello: Hello) -> bytes:
    """52 bytes."""
    fields = _HELLO.pack(_HELLO_MAGIC, HELLO_VERSION, hello.version, hello.epoch, hello.rank, hello.token_hash)
    return fields + _CHECKSUM.pack(crc32(fields))


def unpack_hello(data: bytes) -> Hello:
    """The hello that `data` (52 bytes) is; any fault raises `EpFrameCorrupt`."""
    magic, spoken, version, epoch, rank, digest = _HELLO.unpack_from(data)
    _verify("hello", data, (magic, spoken), _HELLO_MAGIC)
    return Hello(version, epoch, rank, digest)


def pack_answer(reason: Reason) -> bytes:
    """12 bytes."""
    fields = _ANSWER.pack(_ANSWER_MAGIC, HELLO_VERSION, reason)
    return fields + _CHECKSUM.pack(crc32(fields))


def unpack_answer(data: bytes) -> Reason:
    """The answer that `data` (12 bytes) is; any fault raises `EpFrameCorrupt`."""
    magic, spoken, reason = _ANSWER.unpack_from(data)
    _verify("answer", data, (magic, spoken), _ANSWER_MAGIC)
    try:
        return Reason(reason)
    except ValueError as fault:
        raise EpFrameCorrupt(f"answer reason is {reason}, which is unknown") from fault


def judge_hello(hello: Hello, *, version: int, epoch: int, token: str, world: int, taken: frozenset[int]) -> Reason:
    """Whether a hello belongs to this epoch. The token comes first, so that a stranger learns nothing else."""
    if not hmac.compare_digest(hello.token_hash, token_hash(token)):
        return Reason.TOKEN
    if hello.version != version:
        return Reason.VERSION
    if hello.epoch != epoch:
        return Reason.EPOCH
    if not 1 <= hello.rank < world:
        return Reason.RANK
    return Reason.TAKEN if hello.rank in taken else Reason.ACCEPTED


def _verify(what: str, data: bytes, start: tuple[bytes, int], magic: bytes) -> None:
    (stated,) = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    computed = crc32(data[: -_CHECKSUM.size])
    if stated != computed:
        raise EpFrameCorrupt(f"{what} checksum is {stated:#010x}, computed {computed:#010x}")
    if start != (magic, HELLO_VERSION):
        raise EpFrameCorrupt(f"{what} starts with {start}, not {(magic, HELLO_VERSION)}")
