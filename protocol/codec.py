"""Bytes of the message tables, and their framing on a stream.

A message is the msgpack array `[MESSAGES_VERSION, struct]`; a struct carries its class name as its tag. On a stream each message
is a blob: length u32 | crc32 of the payload u32 | payload, little-endian.
"""

from __future__ import annotations

import struct
from functools import cache
from types import UnionType
from typing import Any
from zlib import crc32

import msgspec

from protocol.errors import EpFrameCorrupt, brief
from protocol.messages import MESSAGES_VERSION, Message

BLOB_HEADER = struct.Struct("<II")
MAX_MESSAGE = 1 << 26
"""Most bytes of one message (64 MiB)."""

MessageTypes = UnionType | type[Message]
"""A direction's table, such as `ToEngine`."""


def encode(message: Message) -> bytes:
    """The envelope of a message."""
    return msgspec.msgpack.encode((MESSAGES_VERSION, message))


def decode(union: MessageTypes, data: bytes | bytearray | memoryview) -> Any:
    """The message of table `union` that `data` is, whole and nothing more; any fault raises `EpFrameCorrupt`."""
    try:
        # The version is read first: a struct of another version need not be one that this table knows.
        version, raw = _ENVELOPE.decode(data)
    except _FAULTS as fault:
        raise EpFrameCorrupt(f"message envelope: {brief(fault)}") from fault
    if version != MESSAGES_VERSION:
        raise EpFrameCorrupt(f"message version is {brief(version)}, this process speaks {MESSAGES_VERSION}")
    try:
        return _decoder(union).decode(raw)
    except _FAULTS as fault:
        raise EpFrameCorrupt(f"message: {brief(fault)}") from fault


def pack_blob(payload: bytes) -> bytes:
    """A payload with its length and checksum."""
    return BLOB_HEADER.pack(len(payload), crc32(payload)) + payload


def blob_size(data: bytes | bytearray, limit: int = MAX_MESSAGE) -> int:
    """Bytes of the whole blob that starts `data` (8 bytes or more); raises `EpFrameCorrupt` past `limit`."""
    (length, _) = BLOB_HEADER.unpack_from(data)
    if length > limit:
        raise EpFrameCorrupt(f"message length is {length}, at most {limit}")
    return BLOB_HEADER.size + int(length)


def open_blob(data: bytes) -> bytes:
    """The payload of a whole blob; raises `EpFrameCorrupt` if the checksum or the length differs."""
    length, stated = BLOB_HEADER.unpack_from(data)
    payload = data[BLOB_HEADER.size :]
    if len(payload) != length:
        raise EpFrameCorrupt(f"message has {len(payload)} bytes, its header says {length}")
    computed = crc32(payload)
    if computed != stated:
        raise EpFrameCorrupt(f"message checksum is {stated:#010x}, computed {computed:#010x}")
    return payload


class MessageStream:
    """Cuts a byte stream into the messages of one table. After a fault the stream is lost, and every further call raises.

    `limit` is the size of the longest message that is taken, in bytes; it may be changed between two messages.
    """

    def __init__(self, union: MessageTypes, limit: int = MAX_MESSAGE) -> None:
        self._union = union
        self.limit = limit
        self._buffer = bytearray()
        self._fault: str | None = None

    @property
    def partial(self) -> int:
        """Bytes of a message that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Any]:
        """The messages that `data` completes, in order; raises `EpFrameCorrupt` on the first that is not one."""
        if self._fault is not None:
            raise EpFrameCorrupt(f"stream already lost: {self._fault}")
        self._buffer += data
        messages = []
        try:
            while len(self._buffer) >= BLOB_HEADER.size:
                size = blob_size(self._buffer, self.limit)
                if len(self._buffer) < size:
                    break
                blob = bytes(self._buffer[:size])
                del self._buffer[:size]
                messages.append(decode(self._union, open_blob(blob)))
        except EpFrameCorrupt as fault:
            self._fault = str(fault)
            raise
        return messages


_ENVELOPE = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_FAULTS = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError)


@cache
def _decoder(union: MessageTypes) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(union)
