"""A frame: one command with its tokens, as bytes. Preamble, then the msgpack body, then `n_tokens` int32 tokens.

`decode` accepts exactly what is well-formed by itself; what depends on the slot table is `protocol.slots.prepare`'s to judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
import numpy as np

from protocol.commands import BATCH, BODIES, Body, Cmd, Copy, Decode, Forward, PrefillChunk, Span, Wanted
from protocol.errors import EpCommandFailed, EpFrameCorrupt, EpOutOfOrder, brief
from protocol.preamble import MAX_BODY, MAX_TOKENS, Preamble, pack, preamble_size, unpack

MAX_SLOT = 2**24 - 1
"""Largest slot number that a frame can name."""

_DECODERS: Mapping[int, msgspec.msgpack.Decoder[Any]] = MappingProxyType(
    {cmd: msgspec.msgpack.Decoder(body) for cmd, body in BODIES.items()}
)
_NO_TOKENS = np.zeros(0, dtype=np.int32)


class Frame(NamedTuple):
    """One decoded frame. `tokens` is int32, read-only, and shares no memory with the bytes it came from."""

    preamble: Preamble
    command: Body
    tokens: np.ndarray


def encode(
    command: Body,
    seq_id: int,
    tokens: np.ndarray = _NO_TOKENS,
    epoch: int = 0,
    step: int = 0,
    version: int = 2,
    flags: int = 0,
) -> bytes:
    """Bytes of a frame: `compose` without the frame."""
    return compose(command, seq_id, tokens, epoch, step, version, flags)[0]


def compose(
    command: Body,
    seq_id: int,
    tokens: np.ndarray = _NO_TOKENS,
    epoch: int = 0,
    step: int = 0,
    version: int = 2,
    flags: int = 0,
) -> tuple[bytes, Frame]:
    """Bytes of a frame, and the frame that `decode` makes of them. `tokens` is a one-dimensional integer array, or a list.

    `flags` are those of `protocol.preamble`. A command that no rank would accept raises `EpCommandFailed`: nothing has been
    sent, so only this command fails.
    """
    token_array = np.array(tokens, dtype="<i4")
    token_array.flags.writeable = False
    body = msgspec.msgpack.encode(command)
    payload = body + token_array.tobytes()
    try:
        if token_array.ndim != 1 or len(token_array) > MAX_TOKENS or len(body) > MAX_BODY:
            raise EpFrameCorrupt(
                f"tokens have shape {token_array.shape} (at most {MAX_TOKENS}), body {len(body)} bytes (at most {MAX_BODY})"
            )
        # The body is decoded once here, so that a field out of its range is found by the rank that made it.
        decoded = _decode_body(command.cmd, body)
        _check(decoded, seq_id, token_array, version, flags)
        preamble = Preamble(version, command.cmd, epoch, step, seq_id, len(token_array), len(body), crc32(payload), flags)
        return pack(preamble) + payload, Frame(preamble, decoded, token_array)
    except (EpFrameCorrupt, ValueError) as fault:
        raise EpCommandFailed(f"{command.cmd.name} cannot be sent: {fault}") from fault


def decode(data: bytes | bytearray | memoryview, version: int = 2) -> Frame:
    """The frame that `data` is, whole and nothing more. Every fault is `EpFrameCorrupt` with the field and its value."""
    preamble = unpack(data, version)
    start = preamble_size(version)
    if len(data) != start + preamble.payload_size:
        raise EpFrameCorrupt(f"frame has {len(data)} bytes, its preamble says {start + preamble.payload_size}")
    with memoryview(data) as view:
        computed = crc32(view[start:])
        if computed != preamble.checksum:
            raise EpFrameCorrupt(f"payload checksum is {preamble.checksum:#010x}, computed {computed:#010x}")
        command = _decode_body(preamble.cmd, view[start : start + preamble.body_len])
        # A copy: the body's length leaves the tokens unaligned, and the receive buffer is not theirs to keep.
        tokens = np.frombuffer(view, dtype="<i4", count=preamble.n_tokens, offset=start + preamble.body_len).astype(np.int32)
    tokens.flags.writeable = False
    _check(command, preamble.seq_id, tokens, version, preamble.flags)
    return Frame(preamble, command, tokens)


def expect(frame: Frame, epoch: int, step: int) -> None:
    """Raise `EpOutOfOrder` unless the frame is the one that is due."""
    if (frame.preamble.epoch, frame.preamble.step) != (epoch, step):
        raise EpOutOfOrder(f"frame is epoch {frame.preamble.epoch} step {frame.preamble.step}, due is epoch {epoch} step {step}")


def _decode_body(cmd: int, body: bytes | memoryview) -> Body:
    decoder = _DECODERS.get(cmd)
    if decoder is None:
        known = cmd in Cmd.__members__.values()
        raise EpFrameCorrupt(f"cmd is {cmd}, {f'reserved for {Cmd(cmd).name}, which is not in use' if known else 'unknown'}")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as fault:
        raise EpFrameCorrupt(f"body of {Cmd(cmd).name}: {brief(fault)}") from fault


def _check(command: Body, seq_id: int, tokens: np.ndarray, version: int, flags: int) -> None:
    """Cross-checks between the fields of one frame."""
    _check_seq_id(command, seq_id, version)
    if isinstance(command, Forward):
        due = _check_spans(command, version)
        if tokens.size and tokens.min() < 0:
            raise EpFrameCorrupt(f"token {int(tokens.argmin())} is {int(tokens.min())}")
    else:
        due = 0
        if flags:
            raise EpFrameCorrupt(f"flags is {flags:#x}, {command.cmd.name} has none")
    if len(tokens) != due:
        raise EpFrameCorrupt(f"n_tokens is {len(tokens)}, {command.cmd.name} needs {due}")


def _check_seq_id(command: Body, seq_id: int, version: int) -> None:
    name = command.cmd.name
    if version == 1:
        # The preamble holds seq_id to what the command implies.
        if isinstance(command, Copy):
            raise EpFrameCorrupt(f"{name} needs two slots, version 1 has slot 0 alone")
    elif command.per_slot:
        if not 0 <= seq_id <= MAX_SLOT:
            raise EpFrameCorrupt(f"seq_id is {seq_id}, {name} needs a slot of 0 to {MAX_SLOT}")
    elif seq_id != BATCH and not (isinstance(command, Forward) and [span.slot for span in command.spans] == [seq_id]):
        raise EpFrameCorrupt(f"seq_id is {seq_id}, {name} needs the batch, or the slot of a forward's only span")


def _check_spans(command: Forward, version: int) -> int:
    """The number of tokens that the spans need; raises when a span is malformed."""
    spans = command.spans
    if len({span.slot for span in spans}) != len(spans):
        slot = next(left for left, right in pairwise(sorted(span.slot for span in spans)) if left == right)
        raise EpFrameCorrupt(f"slot {slot} is named twice in {command.cmd.name}")
    if version == 1 and spans[0].slot != 0:
        raise EpFrameCorrupt(f"slot is {spans[0].slot}, version 1 has slot 0 alone")
    one_row, given, last = isinstance(command, Decode), isinstance(command, PrefillChunk), Wanted.LAST
    due = 0
    for span in spans:
        due += span.length - span.fed
        if one_row and span.length != 1:
            raise EpFrameCorrupt(f"length is {span.length} for slot {span.slot}, a DECODE span has one row")
        if given and span.fed:
            raise EpFrameCorrupt(f"fed is true for slot {span.slot}, the tokens of a PREFILL_CHUNK are given")
        if span.wanted is not last:
            _check_wanted(span)
    return due


def _check_wanted(span: Span) -> None:
    wanted = span.wanted
    if isinstance(wanted, list):
        if any(left >= right for left, right in pairwise(wanted)):
            raise EpFrameCorrupt(f"wanted of slot {span.slot} is {brief(wanted)}, not ascending")
        if wanted and wanted[-1] >= span.length:
            raise EpFrameCorrupt(f"wanted of slot {span.slot} has row {wanted[-1]}, the span has {span.length} rows")
        has_last = bool(wanted) and wanted[-1] == span.length - 1
    else:
        has_last = wanted is not Wanted.NONE
    if span.sampled and not has_last:
        raise EpFrameCorrupt(f"sampled is true for slot {span.slot}, whose last row has no logits (wanted {brief(repr(wanted))})")
