"""Who a listener lets in, and how a worker connects, over real sockets."""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest

from protocol.ack import Ack, AckStatus
from protocol.address import split_host_port
from protocol.commands import BATCH, Ping
from protocol.errors import EpDeadline, EpEpochClosed, EpFrameCorrupt, EpHandshakeRefused, EpPeerGone
from protocol.frame import encode
from protocol.hello import Hello, Reason, pack_answer, pack_hello, token_hash, unpack_answer, unpack_hello
from protocol.links import WorkerLink
from protocol.listener import Listener

EPOCH = 5
LONG = 20.0
"""Seconds after which a test that hangs fails; nothing waits for it when the code is right."""


def never():
    return False


def soon(seconds=LONG):
    return monotonic() + seconds


def ack(rank, step):
    return Ack(rank, EPOCH, step, AckStatus.OK)


def addresses(tmp_path):
    return {"unix": f"unix:{tmp_path}/head.sock", "tcp": "127.0.0.1:0", "ipv6": "[::1]:0"}


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


KINDS = ["unix", "tcp", pytest.param("ipv6", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback"))]


def connect(address, rank, **changed):
    wanted = {"rank": rank, "epoch": EPOCH, "token": "secret", "deadline": soon(), "closed": never, **changed}
    return WorkerLink.connect(address, **wanted)


def accept(listener, world=3, refused=None, **changed):
    wanted = {"world": world, "epoch": EPOCH, "token": "secret", "deadline": soon(), "closed": never, **changed}
    return listener.accept(on_refused=[].append if refused is None else refused.append, **wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_connect_in_any_order(kind, tmp_path):
    with Listener(addresses(tmp_path)[kind]) as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, listener)
        workers = {rank: connect(listener.address, rank) for rank in (2, 1)}
        head = accepted.result(LONG)
        frame = encode(Ping(), BATCH, epoch=EPOCH, step=0)
        head.send(frame, soon())
        for rank in (2, 1):
            assert workers[rank].receive(soon()) == frame
            workers[rank].ack(ack(rank, 0), soon())
        assert [found.rank for found in head.collect(0, soon())] == [1, 2]
        head.close()
        for worker in workers.values():
            worker.close()
    assert not (tmp_path / "head.sock").exists()


def test_the_default_listener_is_on_this_host_alone():
    with Listener() as listener:
        assert split_host_port(listener.address)[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("changed", "reason", "reported"),
    [
        ({"token": "guess"}, "TOKEN", "TOKEN"),
        ({"epoch": 4}, "EPOCH", "epoch 4 \\(this one is 5\\)"),
        ({"version": 1}, "VERSION", "frames 1"),
        ({"rank": 0}, "RANK", "rank 0"),
        ({"rank": 2}, "RANK", "rank 2"),
    ],
    ids=["token", "epoch", "version", "the head's rank", "a rank past the world"],
)
def test_a_wrong_hello_is_refused_and_reported_and_the_right_one_still_comes_in(changed, reason, reported):
    refused: list[str] = []
    with Listener() as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, listener, 2, refused)
        with pytest.raises(EpHandshakeRefused, match=reason):
            connect(listener.address, **{"rank": 1, **changed})
        worker = connect(listener.address, 1)
        accepted.result(LONG).close()
        worker.close()
    assert len(refused) == 1
    assert re.search(reported, refused[0])


def sealed(fields):
    return fields + struct.pack("<I", zlib.crc32(fields))


def test_golden_bytes_of_hello_and_answer():
    secret = hashlib.sha256(b"ep_runtime link\0" + b"secret").digest()
    hello = sealed(struct.pack("<4sHHII32s", b"EPHI", 1, 2, 5, 3, secret))
    assert pack_hello(Hello(2, 5, 3, token_hash("secret"))) == hello
    assert unpack_hello(hello) == Hello(2, 5, 3, secret)
    assert pack_answer(Reason.EPOCH) == sealed(struct.pack("<4sHH", b"EPHO", 1, 3))
    assert unpack_answer(sealed(struct.pack("<4sHH", b"EPHO", 1, 0))) is Reason.ACCEPTED


@pytest.mark.parametrize(
    ("data", "unpack", "named"),
    [
        (sealed(struct.pack("<4sHHII32s", b"EPRT", 1, 2, 5, 3, bytes(32))), unpack_hello, "EPRT"),
        (sealed(struct.pack("<4sHHII32s", b"EPHI", 2, 2, 5, 3, bytes(32))), unpack_hello, "hello starts with"),
        (sealed(struct.pack("<4sHH", b"EPHI", 1, 0)), unpack_answer, "EPHI"),
        (sealed(struct.pack("<4sHH", b"EPHO", 1, 9)), unpack_answer, "reason is 9"),
        (struct.pack("<4sHHI", b"EPHO", 1, 0, 0), unpack_answer, "answer checksum"),
    ],
)
def test_a_malformed_hello_or_answer_is_refused_by_name(data, unpack, named):
    with pytest.raises(EpFrameCorrupt, match=named):
        unpack(data)


def test_a_rank_comes_in_once():
    refused: list[str] = []
    with Listener() as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, listener, 3, refused)
        first = connect(listener.address, 1)
        with pytest.raises(EpHandshakeRefused, match="TAKEN"):
            connect(listener.address, 1)
        second = connect(listener.address, 2)
        accepted.result(LONG).close()
        first.close()
        second.close()
    assert ["TAKEN" in line for line in refused] == [True]


def test_strangers_do_not_hold_the_door():
    """One says nothing, one talks another protocol, one leaves at once, one sends half a hello."""
    refused: list[str] = []
    good = pack_hello(Hello(2, EPOCH, 1, token_hash("secret")))
    with Listener() as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, listener, 2, refused)
        where = split_host_port(listener.address)
        strangers = [socket.create_connection(where) for _ in range(3)]
        strangers[1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything\r\n\r\n")
        assert struct.unpack("<4sHH", strangers[1].recv(8))[0] == b"EPHO"
        strangers[2].sendall(good[:-1])
        socket.create_connection(where).close()
        worker = connect(listener.address, 1)
        accepted.result(LONG).close()
        worker.close()
        for stranger in strangers:
            stranger.close()
    assert any("checksum" in line for line in refused)


def test_a_missing_worker_is_named_at_the_deadline(monkeypatch):
    late = [0.0]
    monkeypatch.setattr("protocol.channel.monotonic", lambda: monotonic() + late[0])
    with Listener() as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, listener, 4, deadline=soon(LONG))
        worker = connect(listener.address, 2)
        late[0] = LONG
        with pytest.raises(EpDeadline, match="rank 1, 3 to connect for epoch 5"):
            accepted.result(LONG)
        worker.close()


def test_an_accepted_worker_that_leaves_ends_the_rendezvous():
    with Listener() as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, listener, 3)
        connect(listener.address, 1).close()
        with pytest.raises(EpPeerGone, match=r"rank 1 is gone.*rank 2 to connect"):
            accepted.result(LONG)


WORKER = """
import sys, time
from protocol.ack import Ack, AckStatus
from protocol.links import WorkerLink
link = WorkerLink.connect(sys.argv[1], rank=1, epoch=5, token="secret", deadline=time.monotonic() + 20, closed=lambda: False)
for step in range(3):
    link.receive(None)
    link.ack(Ack(1, 5, step, AckStatus.OK), None)
link.receive(None)
time.sleep(60)
"""


def test_a_killed_process_is_gone_at_once(tmp_path):
    with Listener(f"unix:{tmp_path}/head.sock") as listener:
        worker = subprocess.Popen([sys.executable, "-c", WORKER, listener.address])
        try:
            head = accept(listener, 2)
            for step in range(3):
                head.send(encode(Ping(), BATCH, epoch=EPOCH, step=step), soon())
                assert head.collect(step, soon()) == [ack(1, step)]
            head.send(encode(Ping(), BATCH, epoch=EPOCH, step=3), soon())
            worker.kill()
            with pytest.raises(EpPeerGone, match="rank 1 is gone"):
                head.collect(3, soon())
            head.close()
        finally:
            worker.kill()
            worker.wait(LONG)


def test_the_closed_flag_ends_accept_and_connect(tmp_path):
    flag = threading.Event()
    with Listener() as listener, ThreadPoolExecutor(2) as pool:
        waits = [
            pool.submit(accept, listener, closed=flag.is_set, deadline=None),
            pool.submit(connect, f"unix:{tmp_path}/nobody", 1, closed=flag.is_set, deadline=None),
        ]
        flag.set()
        for wait in waits:
            with pytest.raises(EpEpochClosed):
                wait.result(LONG)


def test_connect_waits_for_a_listener_until_the_deadline(tmp_path):
    address = f"unix:{tmp_path}/head.sock"
    with pytest.raises(EpDeadline, match="a listener at"):
        connect(address, 1, deadline=soon(0.05))
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(connect, address, 1)
        with Listener(address) as listener:
            accept(listener, 2).close()
            early.result(LONG).close()


def test_a_world_of_one_accepts_nobody():
    with Listener() as listener:
        assert accept(listener, 1).world == 1


@pytest.mark.parametrize("address", ["localhost", ":80", "host:", "host:port", "host:65536", "host:-1", ""])
def test_addresses_that_are_none(address):
    with pytest.raises(ValueError, match="address is"):
        split_host_port(address)
