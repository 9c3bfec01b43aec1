"""Command links over real sockets: who is let in, frames and acks, and what ends a wait."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic

import msgspec
import numpy as np
import pytest

from protocol.ack import Ack, AckStatus, ErrorCode, pack_ack
from protocol.channel import Channel
from protocol.commands import BATCH, Ping, PrefillChunk, Shutdown, Span, Wanted, Warm
from protocol.errors import (
    EpDeadline,
    EpDiverged,
    EpEpochClosed,
    EpFrameCorrupt,
    EpOutOfOrder,
    EpPeerGone,
    EpRankFailed,
)
from protocol.frame import decode, encode
from protocol.links import HeadLinks, WorkerLink

OK = AckStatus.OK
EPOCH = 5
LONG = 20.0
"""Seconds after which a test that hangs fails; nothing waits for it when the code is right."""


def never():
    return False


def soon(seconds=LONG):
    return monotonic() + seconds


@contextmanager
def epoch_links(world=3, version=2, closed=never):
    """Connected ends: the head's, and the workers' by rank."""
    pairs = [socket.socketpair() for _ in range(1, world)]
    head = HeadLinks([Channel(a, f"rank {rank}") for rank, (a, _) in enumerate(pairs, 1)], EPOCH, closed)
    workers = {rank: WorkerLink(Channel(b, "the head"), rank, EPOCH, closed, version) for rank, (_, b) in enumerate(pairs, 1)}
    try:
        yield head, workers
    finally:
        head.close()
        for worker in workers.values():
            worker.close()


def ack(rank, step, status=OK, code=ErrorCode.NONE, epoch=EPOCH, **more):
    return Ack(rank, epoch, step, status, code, **more)


def large_frame(step=0):
    """A frame of 4 MB, far more than a socket buffers."""
    length = 1_000_000
    span = Span(slot=0, start=0, length=length, fed=False, sampled=False, wanted=Wanted.NONE, new_blocks=[])
    return encode(PrefillChunk(spans=[span]), BATCH, np.arange(length, dtype=np.int32), EPOCH, step)


@pytest.mark.parametrize("version", [1, 2])
def test_a_step_goes_out_and_its_acks_come_back_in_rank_order(version):
    with epoch_links(version=version) as (head, workers):
        frames = [encode(Ping(), BATCH, epoch=EPOCH, step=step, version=version) for step in range(3)]
        for frame in frames:
            head.send(frame, soon())
        for rank in (2, 1):
            for step in range(3):
                assert workers[rank].receive(soon()) == frames[step]
                workers[rank].ack(ack(rank, step, collectives=step), soon())
        for step in range(3):
            assert head.collect(step, soon()) == [ack(1, step, collectives=step), ack(2, step, collectives=step)]


def test_a_voted_command_is_acked_twice_around_the_verdict():
    with epoch_links(world=2) as (head, workers):
        head.send(encode(Warm(buckets=[1]), BATCH, epoch=EPOCH, step=4), soon())
        workers[1].receive(soon())
        workers[1].ack(ack(1, 4, AckStatus.VOTE_YES), soon())
        assert [vote.status for vote in head.collect(4, soon(), vote=True)] == [AckStatus.VOTE_YES]
        head.send_verdict(4, True, soon())
        assert workers[1].verdict(4, soon()) is True
        workers[1].ack(ack(1, 4), soon())
        assert head.collect(4, soon()) == [ack(1, 4)]
        head.send_verdict(5, False, soon())
        assert workers[1].verdict(5, soon()) is False
        head.send_verdict(6, True, soon())
        with pytest.raises(EpOutOfOrder, match="verdict is for epoch 5 step 6, due is epoch 5 step 7"):
            workers[1].verdict(7, soon())


@pytest.mark.parametrize(
    ("answer", "vote", "error", "named"),
    [
        (ack(1, 8), False, EpOutOfOrder, "ack of rank 1 is for epoch 5 step 8, due is epoch 5 step 7"),
        (ack(1, 7, epoch=4), False, EpOutOfOrder, "epoch 4 step 7"),
        (ack(2, 7), False, EpDiverged, "link of rank 1 says rank 2"),
        (ack(1, 7), True, EpOutOfOrder, "rank 1 acked step 7 with OK, due is a vote"),
        (ack(1, 7, AckStatus.VOTE_YES), False, EpOutOfOrder, "with VOTE_YES, due is a result"),
    ],
)
def test_an_ack_that_is_not_due_ends_the_epoch(answer, vote, error, named):
    with epoch_links(world=2) as (head, workers):
        workers[1].ack(answer, soon())
        with pytest.raises(error, match=named):
            head.collect(7, soon(), vote=vote)


def test_bytes_that_are_no_ack_or_frame_are_refused():
    a, b = socket.socketpair()
    with a, b:
        b.sendall(b"x" * 244)
        with pytest.raises(EpFrameCorrupt, match="ack checksum"):
            HeadLinks([Channel(a, "rank 1")], EPOCH, never).collect(0, soon())
    a, b = socket.socketpair()
    with a, b:
        b.sendall(b"x" * 44)
        with pytest.raises(EpFrameCorrupt, match="preamble checksum"):
            WorkerLink(Channel(a, "the head"), 1, EPOCH, never).receive(soon())


def test_a_preamble_is_verified_before_the_rest_has_come():
    with epoch_links(world=2) as (head, workers):
        frame = bytearray(large_frame()[:44])
        frame[24] ^= 1
        head.send(bytes(frame), soon())
        with pytest.raises(EpFrameCorrupt, match="preamble checksum"):
            workers[1].receive(soon())


def test_a_frame_that_comes_byte_by_byte_is_one_frame():
    a, b = socket.socketpair()
    frame = encode(Ping(), BATCH, epoch=EPOCH, step=0)
    with a, ThreadPoolExecutor(1) as pool:
        worker = WorkerLink(Channel(b, "the head"), 1, EPOCH, never)
        received = pool.submit(worker.receive, soon())
        for byte in frame:
            a.send(bytes([byte]))
        assert received.result(LONG) == frame
        worker.close()


def test_a_large_frame_reaches_a_slow_reader_whose_acks_are_read_meanwhile():
    """The workers first send more acks than a socket buffers, and read the frame only then: each side waits for the other."""
    count = 4000
    with epoch_links() as (head, workers), ThreadPoolExecutor(2) as pool:
        frame = large_frame()

        def work(rank):
            for step in range(count):
                workers[rank].ack(ack(rank, step), soon())
            return workers[rank].receive(soon())

        received = [pool.submit(work, rank) for rank in (1, 2)]
        head.send(frame, soon())
        assert [future.result(LONG) for future in received] == [frame, frame]
        assert decode(frame).tokens[-1] == 999_999
        for step in range(count):
            assert [found.step for found in head.collect(step, soon())] == [step, step]


def test_a_slow_reader_ends_a_send_by_its_deadline():
    with epoch_links() as (head, _), pytest.raises(EpDeadline, match="rank 1, rank 2 to read a frame"):
        head.send(large_frame(), soon(0.05))


@pytest.mark.parametrize("leaves", [1, 2])
def test_a_worker_that_leaves_ends_the_collect_at_once(leaves):
    with epoch_links() as (head, workers), ThreadPoolExecutor(1) as pool:
        collected = pool.submit(head.collect, 0, soon())
        workers[leaves].close()
        with pytest.raises(EpPeerGone, match=f"rank {leaves} is gone"):
            collected.result(LONG)
        with pytest.raises(EpPeerGone, match=f"rank {leaves} is gone"):
            head.send(encode(Ping(), BATCH), soon())
        with pytest.raises(EpPeerGone):
            head.check()


@pytest.mark.parametrize("leaves", [1, 2, 3])
def test_a_worker_that_leaves_after_its_ack_ends_the_step_and_its_ack_is_told(leaves):
    with epoch_links(world=4) as (head, workers):
        workers[leaves].ack(ack(leaves, 0, AckStatus.FAILED, ErrorCode.DEVICE, message="bad card"), soon())
        workers[leaves].close()
        with pytest.raises(EpPeerGone, match=rf"rank {leaves} is gone.*after it acked FAILED bad card"):
            head.collect(0, soon())


def test_workers_may_leave_after_they_acked_a_shutdown():
    with epoch_links() as (head, workers), ThreadPoolExecutor(1) as pool:
        head.send(encode(Shutdown(), BATCH, epoch=EPOCH, step=0), soon())
        collected = pool.submit(head.collect, 0, soon(), leaving=True)
        for rank in (1, 2):
            workers[rank].receive(soon())
            workers[rank].ack(ack(rank, 0), soon())
            workers[rank].close()
        assert [found.rank for found in collected.result(LONG)] == [1, 2]


def test_acks_that_came_before_the_stream_ended_count():
    with epoch_links(world=2) as (head, workers):
        workers[1].ack(ack(1, 0), soon())
        workers[1].close()
        assert head.collect(0, soon()) == [ack(1, 0)]
        with pytest.raises(EpPeerGone):
            head.collect(1, soon())


def test_a_head_that_leaves_ends_every_wait_of_a_worker():
    with epoch_links() as (head, workers):
        head.close()
        for wait in (
            lambda: workers[1].receive(None),
            lambda: workers[1].verdict(0, None),
            lambda: workers[2].receive_blob(None),
            lambda: workers[2].send_blob(b"x", None),
        ):
            with pytest.raises(EpPeerGone, match="the head is gone"):
                wait()


def test_a_head_that_leaves_inside_a_frame_is_gone():
    with epoch_links(world=2) as (head, workers):
        head.send(encode(Ping(), BATCH)[:44], soon())
        head.close()
        with pytest.raises(EpPeerGone):
            workers[1].receive(soon())


def test_check_notices_a_death_while_idle_and_keeps_early_acks():
    with epoch_links(world=2) as (head, workers):
        workers[1].ack(ack(1, 0), soon())
        head.check()
        assert head.collect(0, soon()) == [ack(1, 0)]
        workers[1].close()
        with pytest.raises(EpPeerGone):
            head.check()


def test_deadlines_name_what_is_missing():
    with epoch_links(world=4) as (head, workers):
        workers[2].ack(ack(2, 3), soon())
        with pytest.raises(EpDeadline, match="acks of epoch 5 step 3 from ranks 1, 3"):
            head.collect(3, soon(0.01))
        with pytest.raises(EpDeadline, match="a frame of the head"):
            workers[1].receive(soon(0.01))
        with pytest.raises(EpDeadline, match="the verdict on step 9"):
            workers[1].verdict(9, soon(0.01))


def test_what_has_come_counts_even_after_the_deadline():
    with epoch_links(world=2) as (head, workers):
        frame = encode(Ping(), BATCH, epoch=EPOCH, step=0)
        head.send(frame, soon())
        assert workers[1].receive(monotonic() - 10) == frame
        workers[1].ack(ack(1, 0), soon())
        assert head.collect(0, monotonic() - 10) == [ack(1, 0)]


def test_the_closed_flag_ends_a_wait_within_its_slice():
    flag = threading.Event()
    with epoch_links(closed=flag.is_set) as (head, workers), ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(head.collect, 0, None), pool.submit(workers[1].receive, None)]
        flag.set()
        for wait in waits:
            with pytest.raises(EpEpochClosed, match="epoch closed while waiting for"):
                wait.result(LONG)


def failed(rank, step=0):
    return ack(rank, step, AckStatus.FAILED, ErrorCode.VALUE, message="ValueError: odd")


@pytest.mark.parametrize(("fails", "others"), [(1, "2, 3"), (2, "1, 3"), (3, "1, 2")])
def test_after_a_failing_ack_the_others_have_one_second(fails, others):
    with epoch_links(world=4) as (head, workers):
        workers[fails].ack(failed(fails), soon())
        started = monotonic()
        with pytest.raises(EpRankFailed, match=f"from ranks {others}; rank {fails} failed: ValueError: odd"):
            head.collect(0, soon(60))
        assert 1.0 <= monotonic() - started < 30


def test_the_second_counts_from_the_heads_own_failure():
    with epoch_links() as (head, workers):
        workers[1].ack(ack(1, 0), soon())
        with pytest.raises(EpRankFailed, match="from ranks 2"):
            head.collect(0, soon(60), failed_at=monotonic() - 1)


def test_ranks_that_fail_alike_within_the_second_are_collected():
    with epoch_links() as (head, workers):
        for rank in (1, 2):
            workers[rank].ack(failed(rank), soon())
        assert head.collect(0, soon(), failed_at=monotonic()) == [failed(1), failed(2)]


def test_check_gives_a_busy_head_one_second_after_each_failing_ack(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("protocol.links.monotonic", lambda: clock[0])
    with epoch_links(world=2) as (head, workers):
        for step, when in ((0, 100.0), (1, 200.0)):
            clock[0] = when
            head.check()
            workers[1].ack(failed(1, step), soon())
            head.check()
            clock[0] = when + 0.9
            head.check()
            assert head.collect(step, None) == [failed(1, step)]
        workers[1].ack(failed(1, 2), soon())
        head.check()
        assert head.collect(2, None) == [failed(1, 2)]
        clock[0] = 300.0
        workers[1].ack(failed(1, 3), soon())
        head.check()
        clock[0] = 301.1
        with pytest.raises(EpRankFailed, match="step 3 failed on some ranks while others still run it: rank 1: ValueError: odd"):
            head.check()


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_check_finds_the_failing_ack_of_any_worker(monkeypatch, fails):
    clock = [100.0]
    monkeypatch.setattr("protocol.links.monotonic", lambda: clock[0])
    with epoch_links(world=4) as (head, workers):
        for rank in {1, 2, 3} - {fails}:
            workers[rank].ack(ack(rank, 0), soon())
        workers[fails].ack(failed(fails), soon())
        head.check()
        clock[0] = 101.1
        with pytest.raises(EpRankFailed, match=f"step 0 failed on some ranks while others still run it: rank {fails}: "):
            head.check()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_answered_is_every_worker(world):
    with epoch_links(world=world) as (head, workers):
        for rank in range(world - 1, 0, -1):
            assert not head.answered
            workers[rank].ack(ack(rank, 0), soon())
            head.check()
        assert head.answered
        head.collect(0, soon())
        assert not head.answered
    assert HeadLinks([], EPOCH, never).answered


def test_check_sees_the_closed_flag_and_a_worker_sees_its_head_leave():
    flag = threading.Event()
    with epoch_links(world=2, closed=flag.is_set) as (head, workers):
        head.check()
        workers[1].check()
        flag.set()
        for end in (head, workers[1]):
            with pytest.raises(EpEpochClosed):
                end.check()
        flag.clear()
        head.close()
        with pytest.raises(EpPeerGone, match="the head is gone"):
            workers[1].check()


def test_check_sees_that_a_worker_has_left_behind_everything_that_it_sent_before():
    """Its collectives are cut short next, and what the device then has is garbage: no later check may pass."""
    a, b = socket.socketpair()
    with a:
        with b:
            b.sendall(b"".join(pack_ack(ack(1, step)) for step in range(300)))  # more than is read at a time
        with pytest.raises(EpPeerGone, match="rank 1 is gone"):
            HeadLinks([Channel(a, "rank 1")], EPOCH, never).check()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_an_exchange_shows_every_rank_what_each_gave(world):
    with epoch_links(world=world) as (head, workers), ThreadPoolExecutor(4) as pool:
        ends = [head, *(workers[rank] for rank in range(1, world))]
        for turn in range(3):
            shares = [b"%d of %d" % (turn, rank) * rank for rank in range(world)]
            given = [pool.submit(end.exchange, share, soon()) for end, share in zip(ends, shares, strict=True)]
            assert [each.result() for each in given] == [shares] * world


@pytest.mark.parametrize("answer", [[], [b"a", b"other"], [b"a"], "text", 5, [1, 2]])
def test_an_exchange_without_the_own_share_is_refused(answer):
    with epoch_links(world=2) as (head, workers):
        head.send_blob(msgspec.msgpack.encode(answer), soon())
        with pytest.raises(EpFrameCorrupt, match="shares"):
            workers[1].exchange(b"mine", soon())


def test_a_world_of_one_has_no_links():
    head = HeadLinks([], EPOCH, never)
    head.send(b"frame")
    assert head.collect(0, None) == []
    assert (head.world, head.collect_blobs(None)) == (1, [])


def test_small_writes_are_not_held_back_on_tcp():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        Channel(sock, "rank 1")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_a_peer_that_floods_is_refused():
    a, b = socket.socketpair()
    with a, b:
        channel = Channel(a, "rank 1", limit=100)
        b.sendall(pack_ack(ack(1, 0)))
        with pytest.raises(EpFrameCorrupt, match="rank 1 sent more than 100 bytes"):
            channel.fill()
