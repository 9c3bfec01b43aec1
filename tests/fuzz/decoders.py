"""Everything in `protocol` that turns bytes into values, without a socket: documented errors alone, and round trips."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
from msgspec import inspect as mi

from protocol import messages
from protocol.ack import (
    ACK_SIZE,
    VERDICT_SIZE,
    Ack,
    AckStatus,
    ErrorCode,
    Verdict,
    pack_ack,
    pack_verdict,
    unpack_ack,
    unpack_verdict,
)
from protocol.address import split_host_port
from protocol.codec import BLOB_HEADER, MAX_MESSAGE, MessageStream, blob_size, decode, encode, open_blob, pack_blob
from protocol.errors import EpCommandFailed, EpDiverged, EpFrameCorrupt
from protocol.frame import decode as decode_frame
from protocol.frame import encode as encode_frame
from protocol.hello import (
    ANSWER_SIZE,
    HELLO_SIZE,
    Hello,
    Reason,
    judge_hello,
    pack_answer,
    pack_hello,
    unpack_answer,
    unpack_hello,
)
from protocol.preamble import pack, preamble_size, unpack
from protocol.progress import PAGE_BYTES, ProgressPage
from protocol.slots import SlotLimits, SlotTable, apply, check_integrity, prepare
from protocol.verdict import Outcome, judge, judge_votes
from tests.fuzz.frames import draft, frame_bytes
from tests.fuzz.values import INTEGERS, TEXTS, integer, mutate_bytes, mutate_tree, packed, valid

TABLES = (
    messages.ToEngine,
    messages.ToFrontend,
    messages.ToCoordinator,
    messages.ToSupervisor,
    messages.ToEngineControl,
    messages.FromEngineControl,
)
_KINDS = {table: mi.type_info(table) for table in TABLES}
MEMORY_BASE, MEMORY_FACTOR = 1 << 20, 400
"""A decoder's peak may be this much, and this much per byte of input: an empty list takes 64 bytes and a pointer."""

MESSAGE_LENGTH = 1000


def check_short(fault: Exception, most: int = MESSAGE_LENGTH) -> None:
    """What an error says goes into reports and logs, whatever a peer sent."""
    assert len(str(fault)) < most, f"an error message of {len(str(fault))} characters: {str(fault)[:200]}"


def bounded(size: int, work: Callable[[], Any]) -> Any:
    """The result of `work`, whose memory must follow the bytes that it got, whatever lengths they claim."""
    tracemalloc.start()
    try:
        return work()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY_BASE + MEMORY_FACTOR * size, f"{peak} bytes of memory for {size} bytes of input"


def try_decode(data: bytes, work: Callable[[], Any], measured: bool) -> Any:
    """What `work` decodes, None when it refuses with the one error that decoders have."""
    try:
        return bounded(len(data), work) if measured else work()
    except EpFrameCorrupt as fault:
        check_short(fault)
        return None


def sealed(rng: random.Random, data: bytes, size: int) -> bytes:
    """`data` mutated to `size` bytes, mostly with a right checksum in its last four."""
    data = mutate_bytes(rng, data).ljust(size, b"\0")[:size]
    return data[:-4] + struct.pack("<I", crc32(data[:-4])) if rng.random() < 0.8 else data


def preambles(rng: random.Random, measured: bool) -> None:
    version = rng.choice([1, 2])
    size = preamble_size(version)
    data = frame_bytes(rng, version)[:size]
    data = sealed(rng, data, size) if rng.random() < 0.5 else mutate_bytes(rng, data)
    found = try_decode(data, lambda: unpack(data, version), measured)
    if found is not None:
        assert pack(found) == data[:size]


def frames(rng: random.Random, measured: bool) -> None:
    version = rng.choice([1, 2, 2])
    data = frame_bytes(rng, version)
    found = try_decode(data, lambda: decode_frame(data, version), measured)
    if found is None:
        return
    head, command, tokens = found
    again = encode_frame(command, head.seq_id, tokens, head.epoch, head.step, version, head.flags)
    copy = decode_frame(again, version)
    assert copy.command == command
    assert np.array_equal(copy.tokens, tokens)
    assert copy.preamble[:6] == head[:6]


def large_frames(rng: random.Random, measured: bool) -> None:
    """Bodies of megabytes that break a rule at their very end."""
    count = rng.choice([2_000, 100_000])
    made = draft(rng, 2)
    spans = [[slot, 0, 1, False, False, rng.choice([0, 2]), [], 0] for slot in range(count)]
    kind = rng.randrange(4)
    if kind == 0:
        spans.append(list(spans[-1]))
    elif kind == 1:
        spans[-1][5] = list(range(count, 0, -1))
    elif kind == 2:
        spans[-1][6] = list(range(count))
    made.cmd, made.seq_id, made.body, made.tokens, made.flags = 3, 2**32 - 1, {"spans": spans}, [1] * len(spans), 0
    data = made.pack()
    try_decode(data, lambda: decode_frame(data), measured)


def commands(rng: random.Random, measured: bool) -> None:
    """Decoded commands against one slot table: it changes as promised or not at all."""
    recurrent = rng.random() < 0.3
    sizes = {"max_slots": 4, "num_blocks": 12, "block_size": 4, "max_length": 24, "max_rows": 16}
    limits = SlotLimits(**sizes, max_vision_rows=12, recurrent=recurrent, max_loops=rng.choice([1, 4]))
    table = SlotTable(limits)
    for _ in range(12):
        made = draft(rng, 2)
        made.seq_id = made.seq_id if made.seq_id == 2**32 - 1 else made.seq_id % 5
        for span in made.body.get("spans", []):
            span[0] %= 5
            state = table[span[0]] if span[0] < 4 else None
            span[1] = state.length if state is not None and rng.random() < 0.9 else span[1] % 30
            span[6] = [block % 13 for block in span[6]]
        if "token_budget" in made.body:
            made.body["token_budget"] %= 30
        if made.body.get("loops") is not None and rng.random() < 0.7:
            most = rng.choice([2, 4])
            made.body |= {"loops": [most, [0.5] * (most - 1)], "prompt_length": 3, "prefix_length": 0, "prefix_blocks": []}
        found = try_decode(b"", partial(decode_frame, made.pack()), False)
        if found is None:
            continue
        try:
            change = prepare(found.command, found.preamble.seq_id, table, limits)
        except (EpCommandFailed, EpDiverged):
            pass
        else:
            apply(change, table)
        check_integrity(table, limits)


def acks(rng: random.Random, measured: bool) -> None:
    text = rng.choice(TEXTS) * rng.choice([1, 50])
    status, code = rng.choice(list(AckStatus)), rng.choice(list(ErrorCode))
    ack = Ack(integer(rng, 0, 2**32 - 1), 7, 9, status, code, 3, rng.choice(INTEGERS) % 2**64, text)
    data = sealed(rng, pack_ack(ack), ACK_SIZE)
    found = try_decode(data, lambda: unpack_ack(data), measured)
    if found is not None:
        assert pack_ack(found) == data
    other = sealed(rng, pack_verdict(Verdict(7, rng.choice(INTEGERS) % 2**64, True)), VERDICT_SIZE)
    verdict = try_decode(other, lambda: unpack_verdict(other), measured)
    if verdict is not None:
        assert pack_verdict(verdict) == other


def judgements(rng: random.Random, measured: bool) -> None:
    """Acks of any statuses and codes mean something, and only alike successes are a success."""
    picked = [Ack(rank, 1, 2, rng.choice(list(AckStatus)), rng.choice(list(ErrorCode)), rng.randrange(2)) for rank in range(3)]
    for verdict, good in ((judge, AckStatus.OK), (judge_votes, AckStatus.VOTE_YES)):
        outcome: Outcome = verdict(picked)
        if type(outcome).__name__ == "Ok":
            assert {ack.status for ack in picked} == {good}


def hellos(rng: random.Random, measured: bool) -> None:
    data = sealed(rng, pack_hello(Hello(2, 5, 1, rng.randbytes(32))), HELLO_SIZE)
    found = try_decode(data, lambda: unpack_hello(data), measured)
    if found is not None:
        assert pack_hello(found) == data
        assert judge_hello(found, version=2, epoch=5, token="t", world=4, taken=frozenset({2})) is Reason.TOKEN
    answer = sealed(rng, pack_answer(rng.choice(list(Reason))), ANSWER_SIZE)
    reason = try_decode(answer, lambda: unpack_answer(answer), measured)
    if reason is not None:
        assert pack_answer(reason) == answer


def message_bytes(rng: random.Random, table: Any) -> bytes:
    """A message of a table: half of them valid, the others broken in their tree or their bytes."""
    tree = [messages.MESSAGES_VERSION, valid(rng, _KINDS[table])]
    if rng.random() < 0.5:
        return packed(tree)
    if rng.random() < 0.6:
        return packed(mutate_tree(rng, tree))
    return mutate_bytes(rng, packed(tree))


def envelopes(rng: random.Random, measured: bool) -> None:
    table = rng.choice(TABLES)
    data = message_bytes(rng, table)
    found = try_decode(data, lambda: decode(table, data), measured)
    if found is not None:
        again = encode(found)
        assert encode(decode(table, again)) == again


def blobs(rng: random.Random, measured: bool) -> None:
    payload = rng.randbytes(rng.choice([0, 1, 30]))
    data = mutate_bytes(rng, pack_blob(payload))
    if len(data) < BLOB_HEADER.size:
        return
    size = try_decode(data, lambda: blob_size(data), measured)
    assert size is None or BLOB_HEADER.size <= size <= BLOB_HEADER.size + MAX_MESSAGE
    found = try_decode(data, lambda: open_blob(data), measured)
    if found is not None:
        assert pack_blob(found) == data


def streams(rng: random.Random, measured: bool) -> None:
    """A stream gives the same messages wherever it is cut, up to the first fault, and nothing after it."""
    table = rng.choice(TABLES)
    good = [message_bytes(rng, table) for _ in range(rng.randrange(5))]
    data = b"".join(pack_blob(payload) for payload in good)
    data = mutate_bytes(rng, data) if rng.random() < 0.5 else data
    taken: list[list[Any]] = []
    for whole in (True, False):
        stream, at, found = MessageStream(table), 0, []
        while at < len(data):
            step = 1 << 16 if whole else rng.choice([1, 3, 8, 40, 1000])
            piece = data[at : at + step]
            at += step
            got = try_decode(piece, partial(stream.feed, piece), measured and whole)
            if got is None:
                assert try_decode(b"", partial(stream.feed, b""), False) is None
                break
            found += got
        taken.append([encode(message) for message in found])
    assert taken[0] == taken[1][: len(taken[0])]


def pages(rng: random.Random, measured: bool) -> None:
    """A supervisor reads whatever a broken engine wrote on its page, and can pass it on."""
    data = bytearray(rng.randbytes(PAGE_BYTES))
    for word in range(8):
        if rng.random() < 0.7:
            struct.pack_into("<q", data, 8 * word, rng.choice([value for value in INTEGERS if value < 2**63]))
    at = ProgressPage(data).read()
    assert isinstance(at.command_name, str)
    sent = messages.Progress(
        rank=0,
        epoch=at.epoch,
        step=at.step,
        command=at.command_name,
        phase=at.phase.name,
        collectives=at.collectives,
        moves=at.moves,
        idle_s=at.idle_s,
    )
    assert encode(decode(messages.ToCoordinator, encode(sent))) == encode(sent)
    assert at.idle_s >= 0
    report = messages.Report(rank=0, epoch=0, error="e", message="m", alone=at.alone)
    assert decode(messages.ToCoordinator, encode(report)) == report


def addresses(rng: random.Random, measured: bool) -> None:
    text = mutate_bytes(rng, rng.choice([b"127.0.0.1:80", b"[::1]:65535", b"host:0", b"unix:/x"])).decode(errors="replace")
    try:
        host, port = split_host_port(text)
    except ValueError:
        return
    assert host is not None
    assert 0 <= port <= 65535


DECODERS = (preambles, frames, frames, commands, acks, judgements, hellos, envelopes, envelopes, blobs, streams, pages, addresses)
LARGE_EVERY, MEASURED_EVERY = 2000, 8


def case(rng: random.Random) -> None:
    """One input for one decoder."""
    if rng.randrange(LARGE_EVERY) == 0:
        large_frames(rng, measured=False)
        return
    rng.choice(DECODERS)(rng, rng.randrange(MEASURED_EVERY) == 0)
