"""Live stream sockets: command links of both ends, message sockets and the handshake, fed with what should never come."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from time import monotonic
from typing import Any

import msgspec
from msgspec import inspect as mi

from protocol.ack import Ack, AckStatus, ErrorCode, Verdict, pack_ack, pack_verdict
from protocol.channel import Channel, never_closed
from protocol.codec import encode, pack_blob
from protocol.errors import EpDeadline, EpError, EpLinkLost, EpPeerGone
from protocol.handshake import Fingerprint, Judgement, head_handshake, worker_handshake
from protocol.links import MAX_BLOB, HeadLinks, WorkerLink
from protocol.message_socket import MessageSocket
from protocol.messages import ToCoordinator, ToSupervisor
from tests.fuzz.decoders import MESSAGE_LENGTH, check_short, message_bytes
from tests.fuzz.frames import draft, frame_bytes
from tests.fuzz.values import TEXTS, mutate_bytes, mutate_tree, packed, valid

LONG = 10.0
"""Seconds that nothing waits for: every stream here ends."""
BUFFER = 100_000
"""What a socket takes before its peer reads."""
_FINGERPRINT = mi.type_info(Fingerprint)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a stream."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def read_all(sock: socket.socket) -> bytes:
    """What comes until the stream ends, or is reset because its sender left something unread."""
    data = b""
    with suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data


def cuts(rng: random.Random, data: bytes) -> Iterator[bytes]:
    """`data` in pieces of odd sizes."""
    at = 0
    while at < len(data):
        size = rng.choice([1, 7, 44, 100, 1000, 1 << 16])
        yield data[at : at + size]
        at += size


def drain(rng: random.Random, data: bytes, sock: socket.socket, receive: Callable[[float], Any]) -> list[Any]:
    """What `receive(deadline)` gives while `data` comes in pieces and the stream ends; it must end in a link error.

    A deadline that has passed before a message was complete leaves what has come for the next call.
    """
    found: list[Any] = []
    sock.settimeout(LONG)
    for piece in cuts(rng, data):
        try:
            sock.sendall(piece)
        except OSError:
            break  # closed by a fault, which the next call tells
        try:
            while True:
                found.append(receive(monotonic() - 1))
        except EpDeadline:
            continue
        except EpLinkLost as fault:
            check_short(fault)
            return found
    sock.shutdown(socket.SHUT_WR)
    try:
        while True:
            found.append(receive(monotonic() + LONG))
    except EpDeadline as late:
        raise AssertionError("the end of the stream was not seen") from late
    except EpLinkLost as fault:
        check_short(fault)
    return found


def worker_frames(rng: random.Random) -> None:
    """Whatever follows good frames, a worker gets those whole and in order before its link is lost."""
    good: list[bytes] = []
    with pair() as (ours, theirs), closing(WorkerLink(Channel(ours, "the head"), 1, 0, never_closed)) as link:
        for _ in range(rng.randrange(4)):
            good.append(draft(rng, 2).pack())
        data = b"".join([*good, mutate_bytes(rng, frame_bytes(rng, 2)), frame_bytes(rng, 2)])
        assert drain(rng, data, theirs, link.receive)[: len(good)] == good


def worker_verdicts(rng: random.Random) -> None:
    with pair() as (ours, theirs), closing(WorkerLink(Channel(ours, "the head"), 1, 0, never_closed)) as link:
        data = mutate_bytes(rng, pack_verdict(Verdict(0, 5, True)) * 3)
        assert all(found is True for found in drain(rng, data, theirs, lambda deadline: link.verdict(5, deadline)))


def head_acks(rng: random.Random) -> None:
    """One of three workers answers nonsense: the head hears it, or hears that the worker is gone, and never hangs."""
    with pair() as (a, first), pair() as (b, second), pair() as (c, third):
        links = HeadLinks([Channel(sock, f"rank {rank}") for rank, sock in enumerate((a, b, c), 1)], 0, never_closed)
        with closing(links):
            status = rng.choice(list(AckStatus))
            ack = Ack(2, 0, 5, status, rng.choice(list(ErrorCode)), 1, 2, rng.choice(TEXTS))
            first.sendall(pack_ack(Ack(1, 0, 5, AckStatus.OK)))
            third.sendall(pack_ack(Ack(3, 0, 5, AckStatus.OK)))
            second.sendall(mutate_bytes(rng, pack_ack(ack)))
            second.shutdown(socket.SHUT_WR)
            try:
                links.check()
                found = links.collect(5, monotonic() + LONG, vote=rng.random() < 0.3, leaving=rng.random() < 0.5)
            except EpDeadline as late:
                raise AssertionError("an answer that ended was waited for") from late
            except EpLinkLost as fault:
                check_short(fault)
            else:
                assert [(ack.rank, ack.step) for ack in found] == [(1, 5), (2, 5), (3, 5)]


def handshakes(rng: random.Random) -> None:
    """Both ends against any fingerprint and any judgement. What the head sends, a worker can read."""
    tree = valid(rng, _FINGERPRINT)
    own = msgspec.convert(valid(rng, _FINGERPRINT), Fingerprint)
    if rng.random() < 0.3:
        tree = {**tree, rng.choice(["torch", "host", "device"]): rng.choice(["x", "\0", "é"]) * rng.choice([10, 40_000])}
    if rng.random() < 0.3:
        tree = mutate_tree(rng, tree)
    blob = pack_blob(packed(tree))
    if rng.random() < 0.3:
        blob = mutate_bytes(rng, blob)
    with pair() as (ours, theirs), closing(HeadLinks([Channel(ours, "rank 1")], 0, never_closed)) as links:
        theirs.sendall(blob[:BUFFER])
        theirs.shutdown(socket.SHUT_WR)
        try:
            head_handshake(links, own, monotonic() + LONG)
        except EpDeadline as late:
            raise AssertionError("a handshake that ended was waited for") from late
        except EpError as fault:
            check_short(fault, 20 * MESSAGE_LENGTH)
        links.close()
        answer = read_all(theirs)
    assert len(answer) < MAX_BLOB
    answer = answer or pack_blob(msgspec.msgpack.encode(Judgement(refused=rng.choice([None, "x", "x" * 300]))))
    with pair() as (ours, theirs), closing(WorkerLink(Channel(ours, "the head"), 1, 0, never_closed)) as link:
        theirs.sendall(mutate_bytes(rng, answer) if rng.random() < 0.7 else answer)
        theirs.shutdown(socket.SHUT_WR)
        try:
            worker_handshake(link, own, monotonic() + LONG)
        except EpDeadline as late:
            raise AssertionError("a judgement that ended was waited for") from late
        except EpError:
            return


def message_sockets(rng: random.Random) -> None:
    """A message socket gives the good messages before the first bad one, and ends."""
    table = rng.choice([ToCoordinator, ToSupervisor])
    payloads = [message_bytes(rng, table) for _ in range(rng.randrange(5))]
    data = b"".join(pack_blob(payload) for payload in payloads)
    if rng.random() < 0.5:
        data = mutate_bytes(rng, data)
    with pair() as (ours, theirs), closing(MessageSocket(ours, table)) as link:
        for message in drain(rng, data, theirs, lambda deadline: link.recv(deadline - monotonic())):
            encode(message)


def message_floods(rng: random.Random) -> None:
    """`ready()` of a socket whose peer sends a claimed length and no end: memory follows what came, and the end is seen."""
    with pair() as (ours, theirs), closing(MessageSocket(ours, ToCoordinator)) as link:
        theirs.sendall(rng.choice([1, 1 << 20, (1 << 26) + 1, (1 << 32) - 1]).to_bytes(4, "little") + bytes(rng.randrange(3000)))
        theirs.shutdown(socket.SHUT_WR)
        until = monotonic() + LONG
        try:
            while monotonic() < until:
                link.ready()
        except EpLinkLost:
            return
    raise AssertionError(f"{EpPeerGone.__name__} was not raised at the end of the stream")


TARGETS = (worker_frames, worker_frames, worker_verdicts, head_acks, handshakes, message_sockets, message_floods)


def case(rng: random.Random) -> None:
    """One conversation."""
    rng.choice(TARGETS)(rng)
