"""The fixed answers of a command: a rank's ack, and the head's verdict on votes. All integers are little-endian.

Ack, 244 bytes: magic `EPAK` | version u16 | status u8 | code u8 | epoch u32 | step u64 | rank u32 | collectives u32 | digest u64 |
message length u32 | message 200 bytes of UTF-8, zero-filled | crc32 of the 240 bytes before it u32.

Verdict, 28 bytes: magic `EPVD` | version u16 | commit u16 (0 or 1) | epoch u32 | step u64 | zero u32 | crc32 of the 24 bytes
before it u32.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

from protocol.errors import EpCommandFailed, EpFrameCorrupt, EpLinkLost, EpOutOfOrder

ACK_VERSION = 1
MESSAGE_BYTES = 200

_ACK = struct.Struct(f"<4sHBBIQIIQI{MESSAGE_BYTES}s")
_VERDICT = struct.Struct("<4sHHIQI")
_CHECKSUM = struct.Struct("<I")
_ACK_MAGIC = b"EPAK"
_VERDICT_MAGIC = b"EPVD"

ACK_SIZE = _ACK.size + _CHECKSUM.size
VERDICT_SIZE = _VERDICT.size + _CHECKSUM.size


class AckStatus(IntEnum):
    """What a rank says of a command. A voted command is acked twice: first the vote, then, if committed, the result."""

    OK = 1
    FAILED = 2
    VOTE_YES = 3
    VOTE_NO = 4


class ErrorCode(IntEnum):
    """The class of what a rank raised. Two ranks failed alike when they agree on it and on the collectives they launched."""

    NONE = 0
    COMMAND = 1
    OUT_OF_MEMORY = 2
    MODEL = 3
    VALUE = 4
    TYPE = 5
    LOOKUP = 6
    ARITHMETIC = 7
    ASSERTION = 8
    OS = 9
    RUNTIME = 10
    OTHER = 11
    DEVICE = 12
    LINK = 13


FATAL_CODES = (ErrorCode.DEVICE, ErrorCode.LINK)
"""Codes that end the epoch even when every rank reports them."""

_BY_NAME = (
    ("OutOfMemoryError", ErrorCode.OUT_OF_MEMORY),
    ("AcceleratorError", ErrorCode.DEVICE),
    ("DistError", ErrorCode.LINK),
    ("ModelError", ErrorCode.MODEL),
)
_BY_TEXT = (
    ("can't allocate memory", ErrorCode.OUT_OF_MEMORY),
    ("bad_alloc", ErrorCode.OUT_OF_MEMORY),
    ("CUDA error", ErrorCode.DEVICE),
    ("CUDA driver error", ErrorCode.DEVICE),
    ("CUBLAS_STATUS", ErrorCode.DEVICE),
    ("NCCL", ErrorCode.LINK),
    ("gloo", ErrorCode.LINK),
)
_BY_CLASS: tuple[tuple[type[BaseException], ErrorCode], ...] = (
    (EpCommandFailed, ErrorCode.COMMAND),
    (EpLinkLost, ErrorCode.LINK),
    (MemoryError, ErrorCode.OUT_OF_MEMORY),
    (ValueError, ErrorCode.VALUE),
    (TypeError, ErrorCode.TYPE),
    (LookupError, ErrorCode.LOOKUP),
    (ArithmeticError, ErrorCode.ARITHMETIC),
    (AssertionError, ErrorCode.ASSERTION),
    (OSError, ErrorCode.OS),
    (RuntimeError, ErrorCode.RUNTIME),
)


class Ack(NamedTuple):
    """One rank's answer to one command. `collectives` counts what it launched; `digest` is a u64, 0 unless DIGEST asked for it."""

    rank: int
    epoch: int
    step: int
    status: AckStatus
    code: ErrorCode = ErrorCode.NONE
    collectives: int = 0
    digest: int = 0
    message: str = ""

    @property
    def failed(self) -> bool:
        """True when the command ran on this rank and failed."""
        return self.status is AckStatus.FAILED


class Verdict(NamedTuple):
    """The head's answer to all votes of one command."""

    epoch: int
    step: int
    commit: bool


def error_code(error: BaseException) -> ErrorCode:
    """The code of an exception. Torch's and the models' classes are known by name, since this package imports neither."""
    if not isinstance(error, (EpCommandFailed, EpLinkLost)):
        names = [kind.__name__ for kind in type(error).__mro__]
        for name, code in _BY_NAME:
            if name in names:
                return code
        if isinstance(error, RuntimeError):
            text = str(error)
            for part, code in _BY_TEXT:
                if part in text:
                    return code
    return next((code for kind, code in _BY_CLASS if isinstance(error, kind)), ErrorCode.OTHER)


def failure(
    error: BaseException,
    *,
    rank: int,
    epoch: int,
    step: int,
    phase: str = "",
    collectives: int = 0,
    status: AckStatus = AckStatus.FAILED,
) -> Ack:
    """The ack (or the vote, with `VOTE_NO`) of a rank on which `error` was raised, while it was in `phase`."""
    where = f"{phase}: " if phase else ""
    return Ack(rank, epoch, step, status, error_code(error), collectives, 0, f"{where}{type(error).__name__}: {error}")


def pack_ack(ack: Ack) -> bytes:
    """244 bytes. A message past 200 bytes of UTF-8 is cut at a character."""
    text = ack.message.encode("utf-8", "backslashreplace")[:MESSAGE_BYTES].decode("utf-8", "ignore").encode()
    fields = _ACK.pack(
        _ACK_MAGIC, ACK_VERSION, ack.status, ack.code, ack.epoch, ack.step, ack.rank, ack.collectives, ack.digest, len(text), text
    )
    return fields + _CHECKSUM.pack(crc32(fields))


def unpack_ack(data: bytes | bytearray | memoryview) -> Ack:
    """The ack that `data` (244 bytes) is; any fault raises `EpFrameCorrupt` with the field and its value."""
    fields = _unpack("ack", _ACK, _ACK_MAGIC, data)
    _, _, status, code, epoch, step, rank, collectives, digest, length, text = fields
    try:
        known_status, known_code = AckStatus(status), ErrorCode(code)
    except ValueError as fault:
        raise EpFrameCorrupt(f"ack status is {status}, code {code}: {fault}") from fault
    if (known_code is ErrorCode.NONE) != (known_status in (AckStatus.OK, AckStatus.VOTE_YES)):
        raise EpFrameCorrupt(f"ack status {known_status.name} does not go with code {known_code.name}")
    if length > MESSAGE_BYTES or any(text[length:]):
        raise EpFrameCorrupt(f"ack message length is {length}, at most {MESSAGE_BYTES}, zeros after it")
    try:
        message = text[:length].decode()
    except UnicodeDecodeError as fault:
        raise EpFrameCorrupt(f"ack message: {fault}") from fault
    return Ack(rank, epoch, step, known_status, known_code, collectives, digest, message)


def pack_verdict(verdict: Verdict) -> bytes:
    """28 bytes."""
    fields = _VERDICT.pack(_VERDICT_MAGIC, ACK_VERSION, verdict.commit, verdict.epoch, verdict.step, 0)
    return fields + _CHECKSUM.pack(crc32(fields))


def unpack_verdict(data: bytes | bytearray | memoryview) -> Verdict:
    """The verdict that `data` (28 bytes) is; any fault raises `EpFrameCorrupt`."""
    _, _, commit, epoch, step, zero = _unpack("verdict", _VERDICT, _VERDICT_MAGIC, data)
    if commit > 1 or zero:
        raise EpFrameCorrupt(f"verdict commit is {commit}, filler {zero}")
    return Verdict(epoch, step, bool(commit))


def expect_step(what: str, found: Ack | Verdict, epoch: int, step: int) -> None:
    """Raise `EpOutOfOrder` unless the ack or verdict belongs to the step that is due."""
    if (found.epoch, found.step) != (epoch, step):
        raise EpOutOfOrder(f"{what} is for epoch {found.epoch} step {found.step}, due is epoch {epoch} step {step}")


def _unpack(what: str, layout: struct.Struct, magic: bytes, data: bytes | bytearray | memoryview) -> tuple:
    size = layout.size + _CHECKSUM.size
    if len(data) != size:
        raise EpFrameCorrupt(f"{what} has {len(data)} bytes, not {size}")
    with memoryview(data) as view:
        computed = crc32(view[: layout.size])
    (stated,) = _CHECKSUM.unpack_from(data, layout.size)
    fields = layout.unpack_from(data)
    if computed != stated:
        raise EpFrameCorrupt(f"{what} checksum is {stated:#010x}, computed {computed:#010x} (magic {fields[0]!r})")
    if fields[0] != magic:
        raise EpFrameCorrupt(f"{what} magic is {fields[0]!r}, not {magic!r}")
    if fields[1] != ACK_VERSION:
        raise EpFrameCorrupt(f"{what} version is {fields[1]}, not {ACK_VERSION}")
    return fields
