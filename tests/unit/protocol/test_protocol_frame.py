"""Frames against vectors written out with struct from the layout table, and against every malformation."""

from __future__ import annotations

import struct
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.commands import (
    BATCH,
    BODIES,
    Alloc,
    Cmd,
    Copy,
    Decode,
    Digest,
    Forward,
    Free,
    Loops,
    Mixed,
    Ping,
    PrefillChunk,
    Shutdown,
    Span,
    Vision,
    VisionGrid,
    Wanted,
    Warm,
    forward_command,
)
from protocol.errors import EpCommandFailed, EpFrameCorrupt, EpOutOfOrder
from protocol.frame import compose, decode, encode, expect
from protocol.preamble import MAX_BODY, MAX_TOKENS, RECORD_ROUTING, Preamble, pack, preamble_size, unpack

COUNT = 2**31 - 1


def span(slot=0, start=0, length=1, fed=False, sampled=False, wanted=Wanted.NONE, new_blocks=(), depth=0):
    return Span(slot, start, length, fed, sampled, wanted, list(new_blocks), depth)


def raw(cmd, body, tokens=(), *, magic=b"EPRT", version=2, epoch=7, step=9, seq_id=BATCH, flags=0, n_tokens=None, body_len=None):
    """A version-2 frame written out by hand; valid unless its arguments say otherwise."""
    payload = body + struct.pack(f"<{len(tokens)}i", *tokens)
    head = struct.pack("<4sHHIQ", magic, version, cmd, epoch, step) + struct.pack(
        "<IIIII",
        seq_id,
        len(tokens) if n_tokens is None else n_tokens,
        len(body) if body_len is None else body_len,
        zlib.crc32(payload),
        flags,
    )
    return head + struct.pack("<I", zlib.crc32(head)) + payload


# Bodies spelled in msgpack by hand: fixmap 0x80 | n, fixstr 0xa0 | n, fixarray 0x90 | n, false 0xc2, true 0xc3, uint16 0xcd.
SPAN_DECODE = b"\x98\x03\xcd\x01\xf4\x01\xc3\xc3\x01\x90\x00"  # slot 3, start 500, length 1, fed, sampled, LAST, no blocks
SPAN_CHUNK = b"\x98\x05\x00\x03\xc2\xc2\x92\x00\x02\x91\x08\x00"  # slot 5, start 0, length 3, given, rows 0 and 2, block 8
SPAN_REPLAYED = b"\x98\x06\x09\x01\xc2\xc2\x00\x90\x03"  # slot 6, start 9, length 1, given, no logits, no blocks, depth 3
GOLDEN = [
    (Ping(), BATCH, [], raw(18, b"\x80")),
    (Shutdown(), BATCH, [], raw(19, b"\x80")),
    (Digest(), BATCH, [], raw(17, b"\x80")),
    (Free(), 6, [], raw(16, b"\x80", seq_id=6)),
    (Warm(buckets=[1, 8]), BATCH, [], raw(15, b"\x81\xa7buckets\x92\x01\x08")),
    (
        Alloc(token_budget=64, prompt_length=33, prefix_length=16, prefix_blocks=[4]),
        2,
        [],
        raw(
            1,
            b"\x87\xactoken_budget\x40\xadprompt_length\x21\xa7adapter\x00\xaaowner_rank\x00"
            b"\xadprefix_length\x10\xadprefix_blocks\x91\x04\xa5loops\xc0",
            seq_id=2,
        ),
    ),
    (
        Alloc(token_budget=64, prompt_length=33, loops=Loops(3, [0.5, 1.0])),
        2,
        [],
        raw(
            1,
            b"\x87\xactoken_budget\x40\xadprompt_length\x21\xa7adapter\x00\xaaowner_rank\x00\xadprefix_length\x00"
            b"\xadprefix_blocks\x90\xa5loops\x92\x03\x92\xcb\x3f\xe0\0\0\0\0\0\0\xcb\x3f\xf0\0\0\0\0\0\0",
            seq_id=2,
        ),
    ),
    (
        Copy(source=1, length=17, token_budget=64, shared_blocks=[4], block_pairs=[(5, 6)]),
        2,
        [],
        raw(
            10,
            b"\x85\xa6source\x01\xa6length\x11\xactoken_budget\x40\xadshared_blocks\x91\x04\xabblock_pairs\x91\x92\x05\x06",
            seq_id=2,
        ),
    ),
    (
        Vision(grids=[VisionGrid(2, 3, 4), VisionGrid(500, 1, 6)], rows=6, skipped=1),
        2,
        [],
        raw(7, b"\x83\xa5grids\x92\x93\x02\x03\x04\x93\xcd\x01\xf4\x01\x06\xa4rows\x06\xa7skipped\x01", seq_id=2),
    ),
    (Decode(spans=[span(3, 500, 1, True, True, Wanted.LAST)]), BATCH, [], raw(3, b"\x81\xa5spans\x91" + SPAN_DECODE)),
    (Decode(spans=[span(6, 9, depth=3)]), BATCH, [7], raw(3, b"\x81\xa5spans\x91" + SPAN_REPLAYED, [7])),
    (
        PrefillChunk(spans=[span(5, 0, 3, wanted=[0, 2], new_blocks=[8])]),
        BATCH,
        [11, 12, 2**31 - 1],
        raw(2, b"\x81\xa5spans\x91" + SPAN_CHUNK, [11, 12, 2**31 - 1]),
    ),
    (
        Mixed(spans=[span(3, 500, 1, True, True, Wanted.LAST), span(5, 0, 3, wanted=[0, 2], new_blocks=[8])]),
        BATCH,
        [11, 12, 13],
        raw(4, b"\x81\xa5spans\x92" + SPAN_DECODE + SPAN_CHUNK, [11, 12, 13]),
    ),
]


@pytest.mark.parametrize(("command", "seq_id", "tokens", "data"), GOLDEN, ids=[type(row[0]).__name__ for row in GOLDEN])
def test_golden_bytes(command, seq_id, tokens, data):
    assert encode(command, seq_id, np.array(tokens, dtype=np.int32), 7, 9) == data
    frame = decode(data)
    assert (frame.command, frame.preamble.seq_id, frame.tokens.tolist()) == (command, seq_id, tokens)
    assert (frame.preamble.epoch, frame.preamble.step, frame.preamble.version) == (7, 9, 2)
    assert type(frame.command) is type(command)


def test_golden_covers_every_command_in_use():
    assert {row[0].cmd for row in GOLDEN} == set(BODIES)


def test_golden_version_1():
    body = b"\x81\xa5spans\x91\x98\x00\x00\x02\xc2\xc3\x01\x91\x00\x00"
    payload = body + struct.pack("<2i", 5, 6)
    head = struct.pack("<4sHHIQIIII", b"EPRT", 1, 2, 7, 9, 2, len(body), zlib.crc32(payload), 0)
    assert len(head) + 4 == preamble_size(1) == 40
    data = head + struct.pack("<I", zlib.crc32(head)) + payload
    command = PrefillChunk(spans=[span(0, 0, 2, sampled=True, wanted=Wanted.LAST, new_blocks=[0])])
    assert encode(command, BATCH, np.array([5, 6]), 7, 9, version=1) == data
    frame = decode(data, version=1)
    assert (frame.command, frame.preamble.seq_id, frame.tokens.tolist()) == (command, BATCH, [5, 6])


def test_version_1_implies_slot_0_for_a_slot_command():
    assert decode(encode(Alloc(token_budget=4), 0, version=1), version=1).preamble.seq_id == 0


counts = st.integers(0, COUNT)
blocks = st.lists(counts, max_size=4)


@st.composite
def spans(draw, slot, one_row=False, fed=None):
    length = 1 if one_row else draw(st.integers(1, 9))
    wanted = draw(st.sampled_from(Wanted) | st.lists(st.integers(0, length - 1), unique=True, max_size=length).map(sorted))
    has_last = wanted in (Wanted.LAST, Wanted.ALL) or (isinstance(wanted, list) and length - 1 in wanted)
    return Span(
        slot=slot,
        start=draw(counts),
        length=length,
        fed=draw(st.booleans()) if fed is None else fed,
        sampled=has_last and draw(st.booleans()),
        wanted=wanted,
        new_blocks=draw(blocks),
        depth=draw(st.integers(0, 16)),
    )


@st.composite
def forwards(draw, version=2):
    kind = draw(st.sampled_from([PrefillChunk, Decode, Mixed]))
    slots = [0] if version == 1 else draw(st.lists(st.integers(0, 2**24 - 1), min_size=1, max_size=6, unique=True))
    parts = [draw(spans(slot, kind is Decode, False if kind is PrefillChunk else None)) for slot in slots]
    due = sum(part.length - part.fed for part in parts)
    tokens = draw(st.lists(counts, min_size=due, max_size=due))
    return kind(spans=parts), BATCH, np.array(tokens, dtype=np.int32)


@st.composite
def others(draw, version=2):
    slot = 0 if version == 1 else draw(st.integers(0, 2**24 - 1))
    positive = st.integers(1, COUNT)
    choices = {
        Alloc: lambda: Alloc(
            token_budget=draw(positive),
            prompt_length=draw(counts),
            adapter=draw(counts),
            owner_rank=draw(counts),
            prefix_length=draw(counts),
            prefix_blocks=draw(blocks),
            loops=draw(st.none() | st.builds(Loops, st.integers(1, 16), st.lists(st.floats(0, 1), max_size=15))),
        ),
        Vision: lambda: Vision(
            grids=draw(st.lists(st.builds(VisionGrid, counts, positive, positive), min_size=1, max_size=4)),
            rows=draw(counts),
            skipped=draw(counts),
        ),
        Warm: lambda: Warm(buckets=draw(st.lists(positive, max_size=4))),
        Free: Free,
        Digest: Digest,
        Ping: Ping,
        Shutdown: Shutdown,
    }
    if version == 2:
        choices[Copy] = lambda: Copy(
            source=draw(st.integers(0, 2**24 - 1)),
            length=draw(positive),
            token_budget=draw(positive),
            shared_blocks=draw(blocks),
            block_pairs=draw(st.lists(st.tuples(counts, counts), max_size=3)),
        )
    command = choices[draw(st.sampled_from(list(choices)))]()
    return command, slot if command.per_slot else BATCH, np.zeros(0, dtype=np.int32)


@given(st.data(), st.sampled_from([1, 2]), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_round_trip(data, version, epoch, step):
    command, seq_id, tokens = data.draw(forwards(version) | others(version))
    frame = decode(encode(command, seq_id, tokens, epoch, step, version), version)
    assert frame.command == command
    assert type(frame.command) is type(command)
    assert frame.tokens.dtype == np.int32
    assert not frame.tokens.flags.writeable
    assert frame.tokens.flags.aligned
    assert frame.tokens.tolist() == tokens.tolist()
    assert (frame.preamble.epoch, frame.preamble.step, frame.preamble.seq_id) == (epoch, step, seq_id)


@given(st.data(), st.sampled_from([1, 2]))
@settings(max_examples=100, deadline=None)
def test_the_head_runs_the_frame_that_the_others_decode(data, version):
    command, seq_id, tokens = data.draw(forwards(version) | others(version))
    sent, own = compose(command, seq_id, tokens.tolist(), 3, 4, version)
    frame = decode(sent, version)
    assert (own.preamble, own.command, type(own.command)) == (frame.preamble, frame.command, type(frame.command))
    assert (own.tokens.dtype, own.tokens.tolist()) == (frame.tokens.dtype, frame.tokens.tolist())
    assert own.tokens is not tokens
    assert not own.tokens.flags.writeable


@given(forwards() | others(), st.data())
@settings(max_examples=150, deadline=None)
def test_damage_is_refused(parts, data):
    frame = bytearray(encode(*parts, 3, 4))
    kind = data.draw(st.sampled_from(["flip", "cut", "extend", "byte"]))
    if kind == "flip":
        bit = data.draw(st.integers(0, 8 * len(frame) - 1))
        frame[bit // 8] ^= 1 << bit % 8
    elif kind == "cut":
        del frame[data.draw(st.integers(0, len(frame) - 1)) :]
    elif kind == "extend":
        frame += data.draw(st.binary(min_size=1, max_size=8))
    else:
        place = data.draw(st.integers(0, len(frame) - 1))
        frame[place] = data.draw(st.integers(0, 255).filter(lambda value: value != frame[place]))
    with pytest.raises(EpFrameCorrupt):
        decode(frame)


def test_every_truncation_and_every_bit_flip_is_refused():
    data = GOLDEN[-1][3]
    for size in range(len(data)):
        with pytest.raises(EpFrameCorrupt):
            decode(data[:size])
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EpFrameCorrupt):
            decode(flipped)


@given(st.binary(max_size=80))
@settings(max_examples=200, deadline=None)
def test_noise_with_right_checksums_is_refused_or_whole(noise):
    """Checksums do not stand in for validation: an arbitrary body under a valid preamble raises nothing but EpFrameCorrupt."""
    for cmd in BODIES:
        try:
            frame = decode(raw(cmd, noise))
        except EpFrameCorrupt:
            continue
        assert msgspec.msgpack.decode(noise, type=BODIES[cmd]) == frame.command


def spans_body(*parts):
    return msgspec.msgpack.encode({"spans": [list(part) for part in parts]})


def loops_body(*loops):
    return msgspec.msgpack.encode({"token_budget": 8, "loops": list(loops)})


def vision_body(*grids):
    return msgspec.msgpack.encode({"grids": [list(grid) for grid in grids], "rows": 12})


ROW = (0, 0, 1, True, False, 0, [], 0)
MALFORMED = {
    "magic": (raw(18, b"\x80", magic=b"EPRX"), "magic"),
    "version 1 on a link of 2": (raw(18, b"\x80", version=1), "version is 1"),
    "version 3": (raw(18, b"\x80", version=3), "version is 3"),
    "an undefined flag": (raw(3, spans_body(ROW), flags=2), "flags is 0x2, only 0x1 is defined"),
    "a forward's flag on another command": (raw(18, b"\x80", flags=1), "flags is 0x1, PING has none"),
    "code 0": (raw(0, b"\x80"), "cmd is 0, unknown"),
    "code 20": (raw(20, b"\x80"), "cmd is 20, unknown"),
    "code 65535": (raw(65535, b"\x80"), "unknown"),
    "too many tokens": (raw(18, b"\x80", n_tokens=MAX_TOKENS + 1), "n_tokens"),
    "body too long": (raw(18, b"\x80", body_len=MAX_BODY + 1), "body_len"),
    "n_tokens past the frame": (raw(18, b"\x80", n_tokens=1), "frame has 45 bytes"),
    "body_len past the frame": (raw(18, b"\x80", body_len=2), "frame has 45 bytes"),
    "body_len short of the frame": (raw(18, b"\x80", body_len=0), "frame has 45 bytes"),
    "empty body": (raw(18, b""), "body of PING"),
    "trailing bytes in the body": (raw(18, b"\x80\x80"), "trailing"),
    "body of another type": (raw(18, b"\x90"), "body of PING"),
    "unknown field": (raw(18, b"\x81\xa1x\x01"), "unknown field"),
    "missing field": (raw(1, b"\x80", seq_id=0), "token_budget"),
    "negative budget": (raw(1, b"\x81\xactoken_budget\xff", seq_id=0), "token_budget"),
    "budget of 0": (raw(1, b"\x81\xactoken_budget\x00", seq_id=0), "token_budget"),
    "budget as text": (raw(1, b"\x81\xactoken_budget\xa11", seq_id=0), "token_budget"),
    "budget as float": (raw(1, b"\x81\xactoken_budget" + struct.pack(">Bf", 0xCA, 1.5), seq_id=0), "token_budget"),
    "invalid utf-8 in a name": (raw(18, b"\x81\xa1\xff\x01"), "body of PING"),
    "slot command for the batch": (raw(16, b"\x80"), "seq_id is 4294967295, FREE needs a slot"),
    "slot past the largest": (raw(16, b"\x80", seq_id=2**24), "seq_id is 16777216"),
    "batch command for a slot": (raw(18, b"\x80", seq_id=0), "seq_id is 0, PING needs the batch"),
    "forward for another slot": (raw(3, spans_body(ROW), seq_id=1), "seq_id is 1"),
    "forward of two spans for a slot": (raw(3, spans_body(ROW, (1, *ROW[1:])), seq_id=0), "seq_id is 0"),
    "VISION for the batch": (raw(7, vision_body((2, 3, 4))), "seq_id is 4294967295, VISION needs a slot"),
    "VISION without a grid": (raw(7, vision_body(), seq_id=0), "length >= 1"),
    "a grid too short": (raw(7, vision_body((2, 3)), seq_id=0), "body of VISION"),
    "a grid too long": (raw(7, vision_body((2, 3, 4, 1)), seq_id=0), "body of VISION"),
    "a grid of no height": (raw(7, vision_body((2, 0, 4)), seq_id=0), "body of VISION"),
    "a grid before the prompt": (raw(7, vision_body((-1, 3, 4)), seq_id=0), "body of VISION"),
    "tokens of a VISION": (raw(7, vision_body((2, 3, 4)), [1], seq_id=0), "n_tokens is 1, VISION needs 0"),
    "no spans": (raw(3, b"\x81\xa5spans\x90"), "length >= 1"),
    "span too short": (raw(3, spans_body(ROW[:-2])), "body of DECODE"),
    "span too long": (raw(3, spans_body((*ROW, 0))), "body of DECODE"),
    "depth below 0": (raw(3, spans_body((*ROW[:-1], -1))), "body of DECODE"),
    "depth past the most loops": (raw(3, spans_body((*ROW[:-1], 17))), "body of DECODE"),
    "loops of 0": (raw(1, loops_body(0, []), seq_id=0), "body of ALLOC"),
    "loops past the most": (raw(1, loops_body(17, []), seq_id=0), "body of ALLOC"),
    "loops too short": (raw(1, loops_body(), seq_id=0), "body of ALLOC"),
    "loops too long": (raw(1, loops_body(2, [], 1), seq_id=0), "body of ALLOC"),
    "a threshold below 0": (raw(1, loops_body(2, [-0.1]), seq_id=0), "body of ALLOC"),
    "a threshold above 1": (raw(1, loops_body(2, [1.1]), seq_id=0), "body of ALLOC"),
    "a threshold that is no number": (raw(1, loops_body(2, [float("nan")]), seq_id=0), "body of ALLOC"),
    "length of 0": (raw(3, spans_body((0, 0, 0, False, False, 0, [], 0))), "body of DECODE"),
    "duplicate slot": (raw(3, spans_body(ROW, (1, *ROW[1:]), ROW)), "slot 0 is named twice"),
    "DECODE of two rows": (raw(3, spans_body((0, 0, 2, True, False, 0, [], 0)), [1]), "length is 2"),
    "PREFILL_CHUNK fed": (raw(2, spans_body(ROW)), "fed is true for slot 0"),
    "a token too many": (raw(3, spans_body(ROW), [1]), "n_tokens is 1, DECODE needs 0"),
    "a token missing": (raw(2, spans_body((0, 0, 2, False, False, 0, [], 0)), [1]), "n_tokens is 1, PREFILL_CHUNK needs 2"),
    "tokens of a command without": (raw(18, b"\x80", [1]), "n_tokens is 1, PING needs 0"),
    "negative token": (raw(2, spans_body((0, 0, 2, False, False, 0, [], 0)), [1, -2]), "token 1 is -2"),
    "unknown wanted": (raw(3, spans_body((0, 0, 1, True, False, 3, [], 0))), "body of DECODE"),
    "wanted unsorted": (raw(4, spans_body((0, 0, 3, True, False, [1, 0], [], 0)), [1, 2]), "not ascending"),
    "wanted twice": (raw(4, spans_body((0, 0, 3, True, False, [1, 1], [], 0)), [1, 2]), "not ascending"),
    "wanted out of range": (raw(4, spans_body((0, 0, 3, True, False, [3], [], 0)), [1, 2]), "has row 3"),
    "sampled without logits": (raw(3, spans_body((0, 0, 1, True, True, 0, [], 0))), "sampled is true for slot 0"),
    "sampled, last row not wanted": (raw(4, spans_body((0, 0, 3, True, True, [0, 1], [], 0)), [1, 2]), "sampled is true"),
    "sampled, nothing wanted": (raw(3, spans_body((0, 0, 1, True, True, [], [], 0))), "sampled is true"),
}


@pytest.mark.parametrize(("data", "named"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_is_refused_by_name(data, named):
    with pytest.raises(EpFrameCorrupt, match=named):
        decode(data)


@pytest.mark.parametrize("cmd", [cmd for cmd in Cmd if cmd not in BODIES], ids=lambda cmd: cmd.name)
def test_reserved_code_is_refused_by_name(cmd):
    with pytest.raises(EpFrameCorrupt, match=f"cmd is {int(cmd)}, reserved for {cmd.name}"):
        decode(raw(cmd, b"\x80"))


def test_the_routing_flag_travels_with_a_forward():
    command = Decode(spans=[span(4, 2, 1, True)])
    assert decode(encode(command, BATCH, flags=RECORD_ROUTING)).preamble.flags == 1
    for flags, refused in [(2, command), (1, Ping())]:
        with pytest.raises(EpCommandFailed, match="flags"):
            encode(refused, BATCH, flags=flags)


def test_a_forward_of_one_span_may_name_its_slot():
    command = Decode(spans=[span(4, 2, 1, True)])
    assert decode(encode(command, 4)).preamble.seq_id == 4


def test_the_preamble_checksum_comes_first():
    data = bytearray(raw(99, b"\x80", magic=b"XXXX", version=77, flags=5))
    data[40] ^= 1
    with pytest.raises(EpFrameCorrupt, match="preamble checksum"):
        decode(data)


def test_preamble_functions_agree_with_struct():
    data = raw(18, b"\x80", epoch=2**32 - 1, step=2**64 - 1)
    expected = Preamble(2, 18, 2**32 - 1, 2**64 - 1, BATCH, 0, 1, zlib.crc32(b"\x80"), 0)
    assert unpack(data, 2) == expected
    assert pack(expected) == data[:44]
    assert expected.payload_size == 1


@pytest.mark.parametrize("changed", [{"epoch": 2**32}, {"step": -1}, {"version": 3}, {"version": 1, "seq_id": 1}])
def test_a_preamble_that_does_not_fit_is_not_packed(changed):
    with pytest.raises(ValueError):
        pack(Preamble(2, 18, 0, 0, BATCH, 0, 1, 0)._replace(**changed))


@pytest.mark.parametrize(
    ("command", "seq_id", "tokens", "version", "named"),
    [
        (Alloc(token_budget=0), 0, [], 2, "token_budget"),
        (Alloc(token_budget=1), BATCH, [], 2, "seq_id"),
        (Alloc(token_budget=1), 1, [], 1, "version 1"),
        (Copy(source=0, length=1, token_budget=1), 0, [], 1, "two slots"),
        (Decode(spans=[span(1, fed=True)]), BATCH, [], 1, "slot 0 alone"),
        (Decode(spans=[span(1, fed=True)] * 2), BATCH, [], 2, "twice"),
        (Decode(spans=[span(1)]), BATCH, [], 2, "n_tokens"),
        (Decode(spans=[span(1)]), BATCH, [[1]], 2, "shape"),
        (Decode(spans=[]), BATCH, [], 2, "spans"),
        (Ping(), BATCH, [], 3, "version is 3"),
    ],
)
def test_what_no_rank_would_accept_is_not_sent(command, seq_id, tokens, version, named):
    with pytest.raises(EpCommandFailed, match=named):
        encode(command, seq_id, np.array(tokens, dtype=np.int32), version=version)


@pytest.mark.parametrize(("epoch", "step"), [(3, 5), (4, 4), (2, 4), (3, 3)])
def test_another_epoch_or_step_is_out_of_order(epoch, step):
    frame = decode(encode(Ping(), BATCH, epoch=3, step=4))
    expect(frame, 3, 4)
    with pytest.raises(EpOutOfOrder, match=f"epoch 3 step 4, due is epoch {epoch} step {step}"):
        expect(frame, epoch, step)


def test_forward_command_follows_from_the_spans():
    row, chunk = span(0, 4, 1, True), span(1, 0, 3)
    assert type(forward_command([row])) is Decode
    assert type(forward_command([span(0)])) is Decode
    assert type(forward_command([chunk])) is PrefillChunk
    assert type(forward_command([chunk, span(2)])) is PrefillChunk
    assert type(forward_command([row, chunk])) is Mixed
    assert issubclass(Mixed, Forward)
