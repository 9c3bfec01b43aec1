"""Acks and verdicts as bytes, error classes, and what the acks of all ranks mean together."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.ack import (
    ACK_SIZE,
    VERDICT_SIZE,
    Ack,
    AckStatus,
    ErrorCode,
    Verdict,
    error_code,
    expect_step,
    failure,
    pack_ack,
    pack_verdict,
    unpack_ack,
    unpack_verdict,
)
from protocol.errors import (
    EpCommandFailed,
    EpDeadline,
    EpDiverged,
    EpFrameCorrupt,
    EpLinkLost,
    EpOutOfOrder,
    EpPeerGone,
    EpRankFailed,
)
from protocol.verdict import CommandFailed, LinkLost, Ok, judge, judge_votes, raise_outcome

OK, FAILED, YES, NO = AckStatus.OK, AckStatus.FAILED, AckStatus.VOTE_YES, AckStatus.VOTE_NO


def raw_ack(*, magic=b"EPAK", version=1, status=2, code=4, length=3, text=b"abc"):
    fields = struct.pack("<4sHBBIQIIQI200s", magic, version, status, code, 7, 9, 3, 11, 2**64 - 1, length, text)
    return fields + struct.pack("<I", zlib.crc32(fields))


def raw_verdict(*, magic=b"EPVD", version=1, commit=1, filler=0):
    fields = struct.pack("<4sHHIQI", magic, version, commit, 7, 9, filler)
    return fields + struct.pack("<I", zlib.crc32(fields))


def test_golden_bytes():
    ack = Ack(3, 7, 9, FAILED, ErrorCode.VALUE, 11, 2**64 - 1, "abc")
    assert pack_ack(ack) == raw_ack()
    assert unpack_ack(raw_ack()) == ack
    assert len(raw_ack()) == ACK_SIZE == 244
    assert pack_verdict(Verdict(7, 9, True)) == raw_verdict()
    assert unpack_verdict(raw_verdict(commit=0)) == Verdict(7, 9, False)
    assert len(raw_verdict()) == VERDICT_SIZE == 28


u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
outcomes = st.one_of(
    st.tuples(st.sampled_from([OK, YES]), st.just(ErrorCode.NONE)),
    st.tuples(st.sampled_from([FAILED, NO]), st.sampled_from([code for code in ErrorCode if code])),
)


@given(u32, u32, u64, outcomes, u32, u64, st.text(max_size=300))
@settings(max_examples=150, deadline=None)
def test_round_trip_cuts_the_message_at_a_character(rank, epoch, step, outcome, collectives, digest, message):
    ack = Ack(rank, epoch, step, *outcome, collectives, digest, message)
    found = unpack_ack(pack_ack(ack))
    assert found._replace(message="") == ack._replace(message="")
    assert message.startswith(found.message)
    assert len(found.message.encode()) <= 200
    if found.message != message:
        assert len((found.message + message[len(found.message)]).encode()) > 200


def test_a_message_that_is_not_utf8_still_goes_out():
    assert unpack_ack(pack_ack(Ack(0, 0, 0, OK, message="a\udc80b"))).message == "a\\udc80b"


@pytest.mark.parametrize(("data", "unpack"), [(raw_ack(), unpack_ack), (raw_verdict(), unpack_verdict)], ids=["ack", "verdict"])
def test_truncation_and_bit_flips_are_refused(data, unpack):
    for size in [*range(0, len(data), 7), len(data) - 1]:
        with pytest.raises(EpFrameCorrupt):
            unpack(data[:size])
    with pytest.raises(EpFrameCorrupt):
        unpack(data + b"\0")
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EpFrameCorrupt):
            unpack(flipped)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (raw_ack(magic=b"EPRT"), "magic"),
        (raw_ack(version=2), "version is 2"),
        (raw_ack(status=0), "status is 0"),
        (raw_ack(status=5), "status is 5"),
        (raw_ack(code=200), "code 200"),
        (raw_ack(status=1, code=4), "OK does not go with code VALUE"),
        (raw_ack(status=2, code=0), "FAILED does not go with code NONE"),
        (raw_ack(length=201), "length is 201"),
        (raw_ack(length=2), "zeros after it"),
        (raw_ack(text=b"a\xff\xff"), "message"),
    ],
)
def test_malformed_ack_is_refused_by_name(data, named):
    with pytest.raises(EpFrameCorrupt, match=named):
        unpack_ack(data)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (raw_verdict(magic=b"EPAK"), "magic"),
        (raw_verdict(version=9), "version is 9"),
        (raw_verdict(commit=2), "commit is 2"),
        (raw_verdict(filler=1), "filler 1"),
    ],
)
def test_malformed_verdict_is_refused_by_name(data, named):
    with pytest.raises(EpFrameCorrupt, match=named):
        unpack_verdict(data)


def test_an_ack_of_another_step_is_out_of_order():
    expect_step("ack", Ack(1, 2, 3, OK), 2, 3)
    for epoch, step in [(2, 4), (1, 3)]:
        with pytest.raises(EpOutOfOrder, match="ack is for epoch 2 step 3"):
            expect_step("ack", Ack(1, 2, 3, OK), epoch, step)


def named(name, base):
    """A class that bears a foreign name, as torch's and the models' do for this package."""
    return type(name, (base,), {})


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EpCommandFailed("x"), ErrorCode.COMMAND),
        (EpCommandFailed("CUDA error in a message"), ErrorCode.COMMAND),
        (EpDeadline("x"), ErrorCode.LINK),
        (MemoryError(), ErrorCode.OUT_OF_MEMORY),
        (named("OutOfMemoryError", RuntimeError)("CUDA out of memory"), ErrorCode.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ErrorCode.OUT_OF_MEMORY),
        (named("AcceleratorError", RuntimeError)("x"), ErrorCode.DEVICE),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), ErrorCode.DEVICE),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"), ErrorCode.DEVICE),
        (named("DistBackendError", named("DistError", RuntimeError))("x"), ErrorCode.LINK),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"), ErrorCode.LINK),
        (named("BatchError", named("ModelError", Exception))("x"), ErrorCode.MODEL),
        (UnicodeError(), ErrorCode.VALUE),
        (TypeError(), ErrorCode.TYPE),
        (KeyError(1), ErrorCode.LOOKUP),
        (IndexError(), ErrorCode.LOOKUP),
        (ZeroDivisionError(), ErrorCode.ARITHMETIC),
        (AssertionError(), ErrorCode.ASSERTION),
        (FileNotFoundError(), ErrorCode.OS),
        (RuntimeError("x"), ErrorCode.RUNTIME),
        (Exception("x"), ErrorCode.OTHER),
    ],
    ids=lambda value: value.name if isinstance(value, ErrorCode) else type(value).__name__,
)
def test_error_classes(error, code):
    assert error_code(error) is code


def test_failure_says_what_was_raised():
    ack = failure(KeyError("w"), rank=2, epoch=3, step=4, collectives=5)
    assert ack == Ack(2, 3, 4, FAILED, ErrorCode.LOOKUP, 5, 0, "KeyError: 'w'")
    assert failure(KeyError("w"), rank=2, epoch=3, step=4, status=NO).status is NO


def acks(*rows):
    """Acks of ranks 0, 1, ... from (status, code, collectives, digest)."""
    return [
        Ack(rank, 1, 5, status, code, collectives, digest, f"m{rank}" if code else "")
        for rank, (status, code, collectives, digest) in enumerate(rows)
    ]


NONE, VALUE, COMMAND = ErrorCode.NONE, ErrorCode.VALUE, ErrorCode.COMMAND
OOM, DEVICE, LINK = ErrorCode.OUT_OF_MEMORY, ErrorCode.DEVICE, ErrorCode.LINK
JUDGED = {
    "one rank ok": (acks((OK, NONE, 3, 8)), Ok(3, 8)),
    "all ok": (acks((OK, NONE, 3, 0), (OK, NONE, 3, 0), (OK, NONE, 3, 0)), Ok(3, 0)),
    "all failed alike": (acks((FAILED, VALUE, 2, 0), (FAILED, VALUE, 2, 0)), CommandFailed(VALUE, "m0")),
    "all refused in prepare": (acks((FAILED, COMMAND, 0, 0), (FAILED, COMMAND, 0, 0)), CommandFailed(COMMAND, "m0")),
    "all out of memory alike": (acks((FAILED, OOM, 4, 0), (FAILED, OOM, 4, 0)), CommandFailed(OOM, "m0")),
    "one rank alone failed": (acks((FAILED, VALUE, 2, 0)), CommandFailed(VALUE, "m0")),
    "digests differ": (
        acks((OK, NONE, 0, 8), (OK, NONE, 0, 9), (OK, NONE, 0, 8)),
        LinkLost(EpDiverged, "ranks differ in digests of step 5: 0x0000000000000008 on ranks 0, 2; 0x0000000000000009 on rank 1"),
    ),
    "collectives differ": (
        acks((OK, NONE, 4, 0), (OK, NONE, 3, 0)),
        LinkLost(EpDiverged, "ranks differ in collectives launched of step 5: 4 on rank 0; 3 on rank 1"),
    ),
    "one of three failed": (
        acks((OK, NONE, 3, 0), (FAILED, VALUE, 2, 0), (OK, NONE, 3, 0)),
        LinkLost(EpRankFailed, "only some ranks failed step 5: rank 1: VALUE after 2 collectives: m1"),
    ),
    "two of three failed": (
        acks((OK, NONE, 3, 0), (FAILED, VALUE, 2, 0), (FAILED, VALUE, 2, 0)),
        LinkLost(
            EpRankFailed,
            "only some ranks failed step 5: rank 1: VALUE after 2 collectives: m1; rank 2: VALUE after 2 collectives: m2",
        ),
    ),
    "the last of three differs": (
        acks((OK, NONE, 4, 0), (OK, NONE, 4, 0), (OK, NONE, 3, 0)),
        LinkLost(EpDiverged, "ranks differ in collectives launched of step 5: 4 on ranks 0, 1; 3 on rank 2"),
    ),
    "a middle one of four differs": (
        acks((OK, NONE, 4, 8), (OK, NONE, 4, 8), (OK, NONE, 4, 9), (OK, NONE, 4, 8)),
        LinkLost(
            EpDiverged, "ranks differ in digests of step 5: 0x0000000000000008 on ranks 0, 1, 3; 0x0000000000000009 on rank 2"
        ),
    ),
    "the head alone failed": (
        acks((FAILED, COMMAND, 0, 0), (OK, NONE, 3, 0)),
        LinkLost(EpRankFailed, "only some ranks failed step 5: rank 0: COMMAND after 0 collectives: m0"),
    ),
    "failed with other classes": (
        acks((FAILED, VALUE, 2, 0), (FAILED, COMMAND, 2, 0)),
        LinkLost(
            EpDiverged,
            "ranks differ in error classes of step 5: VALUE on rank 0; COMMAND on rank 1; "
            "rank 0: VALUE after 2 collectives: m0; rank 1: COMMAND after 2 collectives: m1",
        ),
    ),
    "failed after other counts": (
        acks((FAILED, VALUE, 2, 0), (FAILED, VALUE, 3, 0)),
        LinkLost(
            EpDiverged,
            "ranks differ in collectives launched of step 5: 2 on rank 0; 3 on rank 1; "
            "rank 0: VALUE after 2 collectives: m0; rank 1: VALUE after 3 collectives: m1",
        ),
    ),
    "a device error everywhere": (
        acks((FAILED, DEVICE, 2, 0), (FAILED, DEVICE, 2, 0)),
        LinkLost(EpRankFailed, "step 5: rank 0: DEVICE after 2 collectives: m0; rank 1: DEVICE after 2 collectives: m1"),
    ),
    "a link error on one": (
        acks((OK, NONE, 2, 0), (FAILED, LINK, 1, 0)),
        LinkLost(EpPeerGone, "step 5: rank 1: LINK after 1 collectives: m1"),
    ),
    "a device error on the last of three": (
        acks((OK, NONE, 2, 0), (OK, NONE, 2, 0), (FAILED, DEVICE, 1, 0)),
        LinkLost(EpRankFailed, "step 5: rank 2: DEVICE after 1 collectives: m2"),
    ),
    "a vote for a result": (
        acks((OK, NONE, 2, 0), (YES, NONE, 0, 0)),
        LinkLost(EpDiverged, "step 5 asks for OK, FAILED; VOTE_YES on rank 1"),
    ),
    "a vote for a result on the last of three": (
        acks((OK, NONE, 2, 0), (OK, NONE, 2, 0), (YES, NONE, 0, 0)),
        LinkLost(EpDiverged, "step 5 asks for OK, FAILED; VOTE_YES on rank 2"),
    ),
}
VOTES = {
    "all can": (acks((YES, NONE, 0, 0), (YES, NONE, 0, 0)), Ok(0, 0)),
    "one cannot": (
        acks((YES, NONE, 0, 0), (NO, OOM, 0, 0)),
        CommandFailed(OOM, "voted down: rank 1: OUT_OF_MEMORY after 0 collectives: m1"),
    ),
    "one rank alone can": (acks((YES, NONE, 0, 0)), Ok(0, 0)),
    "one rank alone cannot": (
        acks((NO, OOM, 0, 0)),
        CommandFailed(OOM, "voted down: rank 0: OUT_OF_MEMORY after 0 collectives: m0"),
    ),
    "the last of three cannot": (
        acks((YES, NONE, 0, 0), (YES, NONE, 0, 0), (NO, OOM, 0, 0)),
        CommandFailed(OOM, "voted down: rank 2: OUT_OF_MEMORY after 0 collectives: m2"),
    ),
    "none can": (
        acks((NO, COMMAND, 0, 0), (NO, COMMAND, 0, 0)),
        CommandFailed(COMMAND, "voted down: rank 0: COMMAND after 0 collectives: m0; rank 1: COMMAND after 0 collectives: m1"),
    ),
    "a device error": (
        acks((YES, NONE, 0, 0), (NO, DEVICE, 0, 0)),
        LinkLost(EpRankFailed, "step 5: rank 1: DEVICE after 0 collectives: m1"),
    ),
    "a result for a vote": (
        acks((YES, NONE, 0, 0), (FAILED, VALUE, 0, 0)),
        LinkLost(EpDiverged, "step 5 asks for VOTE_YES, VOTE_NO; FAILED on rank 1"),
    ),
}


@pytest.mark.parametrize(("given_acks", "outcome"), JUDGED.values(), ids=JUDGED.keys())
def test_judge(given_acks, outcome):
    assert judge(given_acks) == outcome


@pytest.mark.parametrize(("given_acks", "outcome"), VOTES.values(), ids=VOTES.keys())
def test_judge_votes(given_acks, outcome):
    assert judge_votes(given_acks) == outcome


def test_raise_outcome():
    assert raise_outcome(Ok(1, 2)) == Ok(1, 2)
    with pytest.raises(EpCommandFailed, match="why") as caught:
        raise_outcome(CommandFailed(VALUE, "why"))
    assert not isinstance(caught.value, EpLinkLost)
    with pytest.raises(EpDiverged, match="where"):
        raise_outcome(LinkLost(EpDiverged, "where"))
