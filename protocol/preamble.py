"""The fixed head of every frame: pure functions between a `Preamble` and its bytes. All integers are little-endian.

Version 2, 44 bytes: magic `EPRT` | version u16 | cmd u16 | epoch u32 | step u64 | seq_id u32 | n_tokens u32 | body_len u32 |
crc32 of body and tokens u32 | flags u32 | crc32 of the 40 bytes before it u32.

Version 1, the one-sequence dialect, 40 bytes: the same without seq_id. Its only slot is 0, and whether a command concerns the
slot or the batch follows from the command.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

from protocol.commands import BATCH, BODIES
from protocol.errors import EpFrameCorrupt

MAGIC = b"EPRT"
VERSIONS = (1, 2)
MAX_TOKENS = 1 << 22
"""Most tokens of a frame (16 MiB of int32)."""
MAX_BODY = 1 << 24
"""Most bytes of a body."""

RECORD_ROUTING = 1
"""Flag of a forward whose expert choices every rank records, for the next DIGEST to cover."""

_LAYOUTS = {1: struct.Struct("<4sHHIQIIII"), 2: struct.Struct("<4sHHIQIIIII")}
_CHECKSUM = struct.Struct("<I")
_START = struct.Struct("<4sH")


class Preamble(NamedTuple):
    """The fields of a preamble, apart from the magic and its own checksum. `checksum` is the crc32 of body and tokens."""

    version: int
    cmd: int
    epoch: int
    step: int
    seq_id: int
    n_tokens: int
    body_len: int
    checksum: int
    flags: int = 0

    @property
    def payload_size(self) -> int:
        """Bytes of body and tokens that follow."""
        return self.body_len + 4 * self.n_tokens


def preamble_size(version: int) -> int:
    """Bytes of a preamble: 40 in version 1, 44 in version 2."""
    return _LAYOUTS[version].size + _CHECKSUM.size


def implied_seq_id(cmd: int) -> int:
    """What version 1 leaves unsaid: slot 0, or the batch for a command that concerns the batch."""
    body = BODIES.get(cmd)
    return 0 if body is None or body.per_slot else BATCH


def pack(preamble: Preamble) -> bytes:
    """Bytes of a preamble. In version 1 the seq_id must be the implied one; any misfit raises `ValueError`."""
    version, cmd, epoch, step, seq_id, *rest = preamble
    if version not in VERSIONS:
        raise ValueError(f"version is {version}, known are {VERSIONS}")
    if preamble.flags & ~RECORD_ROUTING:
        raise ValueError(f"flags is {preamble.flags:#x}, only {RECORD_ROUTING:#x} is defined")
    try:
        if version == 1:
            if seq_id != implied_seq_id(cmd):
                raise ValueError(f"seq_id is {seq_id}, version 1 implies {implied_seq_id(cmd)} for command {cmd}")
            fields = _LAYOUTS[1].pack(MAGIC, version, cmd, epoch, step, *rest)
        else:
            fields = _LAYOUTS[2].pack(MAGIC, version, cmd, epoch, step, seq_id, *rest)
    except struct.error as fault:
        raise ValueError(f"preamble does not fit its fields: {preamble}: {fault}") from fault
    return fields + _CHECKSUM.pack(crc32(fields))


def unpack(data: bytes | bytearray | memoryview, version: int) -> Preamble:
    """The preamble at the start of `data`, on a link that speaks `version`. The checksum is tested first, then each bound."""
    layout = _LAYOUTS[version]
    if len(data) < layout.size + _CHECKSUM.size:
        raise EpFrameCorrupt(f"preamble has {len(data)} bytes, version {version} has {layout.size + _CHECKSUM.size}")
    with memoryview(data) as view:
        computed = crc32(view[: layout.size])
    (stated,) = _CHECKSUM.unpack_from(data, layout.size)
    if computed != stated:
        magic, spoken = _START.unpack_from(data)
        raise EpFrameCorrupt(
            f"preamble checksum is {stated:#010x}, computed {computed:#010x} "
            f"(magic {magic!r}, version {spoken}, this link speaks {version})"
        )
    fields = layout.unpack_from(data)
    magic, spoken, cmd, epoch, step = fields[:5]
    seq_id, n_tokens, body_len, checksum, flags = fields[5:] if version == 2 else (implied_seq_id(cmd), *fields[5:])
    if magic != MAGIC:
        raise EpFrameCorrupt(f"magic is {magic!r}, not {MAGIC!r}")
    if spoken != version:
        raise EpFrameCorrupt(f"version is {spoken}, this link speaks {version}")
    if n_tokens > MAX_TOKENS:
        raise EpFrameCorrupt(f"n_tokens is {n_tokens}, at most {MAX_TOKENS}")
    if body_len > MAX_BODY:
        raise EpFrameCorrupt(f"body_len is {body_len}, at most {MAX_BODY}")
    if flags & ~RECORD_ROUTING:
        raise EpFrameCorrupt(f"flags is {flags:#x}, only {RECORD_ROUTING:#x} is defined")
    return Preamble(version, cmd, epoch, step, seq_id, n_tokens, body_len, checksum, flags)
