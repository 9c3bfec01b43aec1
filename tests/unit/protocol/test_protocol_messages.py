"""Every message of every table round-trips; what is not one is refused; streams and sockets deliver them whole and in order."""

from __future__ import annotations

import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import messages
from protocol.codec import MessageStream, decode, encode, pack_blob
from protocol.errors import EpDeadline, EpEpochClosed, EpFrameCorrupt, EpPeerGone
from protocol.message_socket import MessageSocket
from protocol.messages import Abort, Loaded, Message, Progress, SamplingParams, Stop, Submit, ToCoordinator, ToEngine, ToSupervisor

TABLES = {
    name: getattr(messages, name)
    for name in ("ToEngine", "ToFrontend", "ToCoordinator", "ToSupervisor", "ToEngineControl", "FromEngineControl")
}
PAIRS = [(name, kind) for name, table in TABLES.items() for kind in get_args(table)]


def strategy(kind):
    """Values of an annotated type, read from msgspec's own description of it."""
    return from_info(msgspec.inspect.type_info(kind))


def from_info(info):
    match info:
        case msgspec.inspect.IntType():
            return st.integers(info.ge if info.ge is not None else -(2**63), info.le if info.le is not None else 2**64 - 1)
        case msgspec.inspect.FloatType():
            return st.floats(info.ge, info.le, allow_nan=False)
        case msgspec.inspect.StrType():
            return st.text(max_size=12)
        case msgspec.inspect.BytesType():
            return st.binary(min_size=info.min_length or 0, max_size=info.max_length or 12)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType():
            return st.sampled_from(info.values)
        case msgspec.inspect.ListType():
            return st.lists(from_info(info.item_type), max_size=3)
        case msgspec.inspect.DictType():
            return st.dictionaries(from_info(info.key_type), from_info(info.value_type), max_size=3)
        case msgspec.inspect.UnionType():
            return st.one_of([from_info(part) for part in info.types])
        case msgspec.inspect.StructType():
            return st.builds(info.cls, **{field.name: from_info(field.type) for field in info.fields})
    raise NotImplementedError(info)


def test_the_tables_hold_every_message():
    assert {kind for _, kind in PAIRS} == set(Message.__subclasses__())


@pytest.mark.parametrize(("name", "kind"), PAIRS, ids=[f"{name}-{kind.__name__}" for name, kind in PAIRS])
def test_round_trip(name, kind):
    @given(strategy(kind))
    @settings(max_examples=25, deadline=None)
    def check(message):
        found = decode(TABLES[name], encode(message))
        assert type(found) is kind
        assert found == message

    check()


def test_golden_bytes():
    assert encode(Stop(reason="r", grace=0.5)) == (b"\x92\x05\x83\xa4type\xa4Stop\xa6reason\xa1r\xa5grace\xcb\x3f\xe0\0\0\0\0\0\0")
    payload = encode(Loaded(rank=3))
    assert pack_blob(payload) == struct.pack("<II", len(payload), zlib.crc32(payload)) + payload


V = 5
"""The version that is spoken."""


def envelope(*parts):
    return msgspec.msgpack.encode(list(parts))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "envelope"),
        (b"\xc1", "envelope"),
        (envelope(V), "envelope"),
        (envelope(V, {"type": "Loaded", "rank": 0}, V), "envelope"),
        (envelope("2", {"type": "Loaded", "rank": 0}), "envelope"),
        (envelope(V - 1, {"type": "Loaded", "rank": 0}), "version is 4"),
        (envelope(V - 1, "of another shape"), "version is 4"),
        (envelope(V, {"type": "Loaded", "rank": 0}) + b"\0", "trailing"),
        (envelope(V, {"type": "Submit"}), "Submit"),
        (envelope(V, {"type": "Nothing"}), "Nothing"),
        (envelope(V, {"rank": 0}), "type"),
        (envelope(V, {"type": "Loaded"}), "rank"),
        (envelope(V, {"type": "Loaded", "rank": -1}), "rank"),
        (envelope(V, {"type": "Loaded", "rank": 1.5}), "rank"),
        (envelope(V, {"type": "Loaded", "rank": 0, "more": 1}), "unknown field"),
        (b"\x92\x05" + b"\x91" * 5000, "message"),
    ],
)
def test_what_is_not_a_message_of_the_table_is_refused(data, named):
    with pytest.raises(EpFrameCorrupt, match=named):
        decode(ToCoordinator, data)


@given(st.binary(max_size=60))
@settings(max_examples=150, deadline=None)
def test_noise_raises_nothing_else(noise):
    for data in (noise, b"\x92\x04" + noise):
        try:
            decode(ToCoordinator, data)
        except EpFrameCorrupt:
            continue


PROGRESS = Progress(rank=0, epoch=2, step=3, command="DECODE", phase="x" * 40, collectives=4, moves=5, idle_s=0.25)
BATCH = [Loaded(rank=1), PROGRESS, Stop(reason="é", grace=1.5)]
STREAM = b"".join(pack_blob(encode(message)) for message in BATCH)


@given(st.lists(st.integers(0, len(STREAM)), max_size=6).map(sorted))
@settings(max_examples=100, deadline=None)
def test_a_stream_cut_anywhere_gives_the_same_messages(cuts):
    stream = MessageStream(ToCoordinator)
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(STREAM)], strict=True):
        found += stream.feed(STREAM[start:end])
    assert found == BATCH
    assert stream.partial == 0


def test_every_bit_flip_in_a_stream_is_refused_or_waits_for_more():
    data = pack_blob(encode(BATCH[0]))
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        stream = MessageStream(ToCoordinator, limit=1000)
        try:
            found = stream.feed(flipped)
        except EpFrameCorrupt:
            # What follows a fault cannot be trusted to start at a message.
            with pytest.raises(EpFrameCorrupt, match="already lost"):
                stream.feed(data)
            continue
        assert found == []
        assert stream.partial == len(data)


def test_a_length_past_the_limit_is_refused_before_its_bytes_come():
    with pytest.raises(EpFrameCorrupt, match="length is 1001, at most 1000"):
        MessageStream(ToCoordinator, limit=1000).feed(struct.pack("<II", 1001, 0))


@pytest.fixture
def pair():
    opened = []

    def make(left=ToCoordinator, right=ToSupervisor, **options):
        ends = [MessageSocket(end, table, **options) for end, table in zip(socket.socketpair(), (left, right), strict=True)]
        opened.extend(ends)
        return ends

    yield make
    for end in opened:
        end.close()


def test_socket_delivers_in_order_and_ends_with_peer_gone(pair):
    left, right = pair()
    for message in BATCH:
        right.send(message, 5)
    right.close()
    assert left.recv(5) == BATCH[0]
    assert left.ready() == BATCH[1:]
    with pytest.raises(EpPeerGone, match="peer is gone"):
        left.ready()
    with pytest.raises(EpPeerGone):
        left.recv(5)
    with pytest.raises(EpPeerGone):
        left.send(BATCH[2], 5)


def test_socket_deadline_and_closed_flag(pair):
    left, _ = pair()
    with pytest.raises(EpDeadline, match="a message of peer"):
        left.recv(0.01)
    assert left.ready() == []
    left, _ = pair(closed=lambda: True)
    with pytest.raises(EpEpochClosed):
        left.recv(5)


def submit(size):
    return Submit(request_id="r", group="g", prompt=[2**31 - 1] * size, sampling=SamplingParams(seed=1, max_tokens=2))


def test_two_peers_who_send_large_messages_at_once_do_not_wait_for_each_other(pair):
    left, right = pair(ToEngine, ToEngine)
    big = submit(400_000)

    def talk(end):
        end.send(big, 20)
        return end.recv(20)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(talk, (left, right))) == [big, big]


def test_a_peer_who_never_reads_ends_a_send_by_deadline_and_one_who_leaves_by_peer_gone(pair):
    left, right = pair(ToEngine, ToEngine)
    with pytest.raises(EpDeadline, match="to read"):
        left.send(submit(400_000), 0.05)
    left, right = pair(ToEngine, ToEngine)
    thread = threading.Timer(0.05, right.close)
    thread.start()
    started = time.monotonic()
    with pytest.raises(EpPeerGone):
        left.send(submit(400_000), 20)
    assert time.monotonic() - started < 10
    thread.join()


def test_a_corrupt_message_is_refused_by_the_socket():
    a, b = socket.socketpair()
    left = MessageSocket(a, ToEngine)
    b.sendall(pack_blob(b"\x92\x01\xc0"))
    try:
        with pytest.raises(EpFrameCorrupt):
            left.recv(5)
    finally:
        left.close()
        b.close()
    assert decode(ToEngine, encode(Abort(request_ids=["a"]))) == Abort(request_ids=["a"])
