"""What fuzzing found in the wire code, each as the smallest case that shows it."""

from __future__ import annotations

import socket
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from time import monotonic

import msgspec
import pytest

from protocol.address import split_host_port
from protocol.channel import Channel, never_closed
from protocol.codec import decode, encode, pack_blob
from protocol.commands import BATCH
from protocol.errors import SHOWN, EpFrameCorrupt, EpHandshakeRefused, brief
from protocol.frame import decode as decode_frame
from protocol.handshake import head_handshake
from protocol.links import MAX_BLOB, HeadLinks, WorkerLink
from protocol.listener import Listener
from protocol.message_socket import MessageSocket
from protocol.messages import MESSAGES_VERSION, Progress, Report, ToCoordinator
from protocol.progress import PAGE_BYTES, Phase, ProgressPage
from tests.unit.protocol.test_protocol_handshake import HEAD, rank

LONG = 20.0


def frame(spans: list[list]) -> bytes:
    """A DECODE over these spans, its checksums right."""
    body = msgspec.msgpack.encode({"spans": spans})
    payload = body + struct.pack("<i", 1) * len(spans)
    head = struct.pack("<4sHHIQIIIII", b"EPRT", 2, 3, 0, 0, BATCH, len(spans), len(body), zlib.crc32(payload), 0)
    return head + struct.pack("<I", zlib.crc32(head)) + payload


def row(slot: int, wanted: object = 0) -> list:
    return [slot, 0, 1, False, False, wanted, []]


def test_a_slot_named_twice_among_very_many_is_found_at_once():
    spans = [row(slot) for slot in range(200_000)]
    began = monotonic()
    with pytest.raises(EpFrameCorrupt, match="slot 199999 is named twice in DECODE"):
        decode_frame(frame([*spans, row(199_999)]))
    assert monotonic() - began < LONG  # a search of all spans for each of them takes minutes


LONG_TEXT = "x" * 100_000


@pytest.mark.parametrize(
    "work",
    [
        lambda: decode_frame(frame([row(0, [*range(5000, 0, -1)])])),
        lambda: decode(ToCoordinator, msgspec.msgpack.encode([MESSAGES_VERSION, {"type": LONG_TEXT}])),
        lambda: decode(ToCoordinator, msgspec.msgpack.encode([MESSAGES_VERSION, {"type": "Loaded", LONG_TEXT: 1}])),
    ],
    ids=["wanted", "tag", "field"],
)
def test_an_error_does_not_repeat_all_that_was_sent(work):
    with pytest.raises(EpFrameCorrupt) as refused:
        work()
    assert len(str(refused.value)) < 2 * SHOWN


def test_brief_keeps_short_texts_and_says_how_long_the_others_were():
    assert brief("x" * SHOWN) == "x" * SHOWN
    assert brief(LONG_TEXT) == "x" * SHOWN + "... (100000 characters)"


def test_a_refusal_of_large_fingerprints_reaches_the_workers_as_a_refusal():
    large = dict.fromkeys(("torch", "device", "layout"), "y" * (MAX_BLOB // 5))
    ours, theirs = socket.socketpair()
    with closing(HeadLinks([Channel(ours, "rank 1")], 0, never_closed)) as links:
        link = WorkerLink(Channel(theirs, "the head"), 1, 0, never_closed)
        sender = threading.Thread(target=link.send_blob, args=(msgspec.msgpack.encode(rank(1, **large)), monotonic() + LONG))
        sender.start()
        with pytest.raises(EpHandshakeRefused, match="torch is 'yyy"):
            head_handshake(links, HEAD, monotonic() + LONG)
        sender.join()
        assert b"torch is" in link.receive_blob(monotonic() + LONG)
        link.close()


def test_silent_strangers_do_not_keep_a_worker_out():
    refused: list[str] = []
    common = {"epoch": 1, "token": "t", "deadline": monotonic() + LONG, "closed": never_closed}
    with ExitStack() as stay, Listener() as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, world=2, on_refused=refused.append, **common)
        for _ in range(300):
            stay.enter_context(socket.create_connection(split_host_port(listener.address), timeout=LONG))
        worker = WorkerLink.connect(listener.address, rank=1, **common)
        accepted.result(LONG).close()
        worker.close()
    assert "more than 256 connections wait to say hello" in refused[0]


def test_a_peer_that_is_not_trusted_gets_little_memory():
    report = Report(rank=0, epoch=0, error="e", message="m" * 5000)
    ours, theirs = socket.socketpair()
    with theirs, closing(MessageSocket(ours, ToCoordinator, limit=1000)) as link:
        theirs.sendall(struct.pack("<II", 1001, 0))
        with pytest.raises(EpFrameCorrupt, match="length is 1001, at most 1000"):
            link.ready()
    ours, theirs = socket.socketpair()
    with theirs, closing(MessageSocket(ours, ToCoordinator, limit=1000)) as link:
        link.trust()
        theirs.sendall(pack_blob(encode(report)))
        assert link.recv(LONG) == report


def page(**words: int) -> ProgressPage:
    names = ("moves", "epoch", "step", "command", "phase", "collectives", "time", "id_length")
    return ProgressPage(bytearray(struct.pack("<8q", *(words.get(name, 0) for name in names)).ljust(PAGE_BYTES, b"\xff")))


@pytest.mark.parametrize("phase", [-1, 12, 2**62])
def test_a_page_with_a_phase_that_is_none_is_read(phase):
    assert page(phase=phase).read().phase is Phase.UNKNOWN
    assert page(phase=Phase.STANDBY).read().phase is Phase.STANDBY


def test_a_page_with_a_command_that_is_none_is_read():
    assert page(command=99).read().command_name == "99"
    assert page(command=-5).read().command_name == ""
    assert page(command=18).read().command_name == "PING"


def test_what_stands_on_any_page_can_be_sent_on():
    at = page(moves=-1, epoch=-2, step=-3, command=-4, collectives=-5, time=2**63 - 1, id_length=-6).read()
    assert (at.moves, at.epoch, at.step, at.collectives, at.idle_s, at.alone) == (0, 0, 0, 0, 0.0, "")
    sent = Progress(rank=0, epoch=at.epoch, step=at.step, command="", phase="", collectives=0, moves=at.moves, idle_s=at.idle_s)
    assert decode(ToCoordinator, encode(sent)) == sent
    assert len(page(id_length=2**60).read().alone) > 0
