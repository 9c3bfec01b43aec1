"""A listener of an epoch among strangers: garbage, half hellos, storms and leavers come, and the real workers still get in."""

from __future__ import annotations

import random
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from time import monotonic

from protocol.address import split_host_port
from protocol.channel import never_closed
from protocol.commands import BATCH, Ping
from protocol.frame import encode
from protocol.hello import HELLO_SIZE, Hello, pack_hello, token_hash
from protocol.links import HeadLinks, WorkerLink
from protocol.listener import Listener
from tests.fuzz.values import INTEGERS, mutate_bytes

LONG = 15.0
TOKEN = "secret"
WORLD, EPOCH = 3, 5
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: close by a reset."""


def stranger(rng: random.Random) -> bytes:
    """What one who does not belong here says first. None of it is a right hello of a rank of this epoch."""
    kind = rng.randrange(6)
    if kind == 0:
        return b""
    if kind == 1:
        return rng.randbytes(rng.choice([1, 51, 52, 53, 3000]))
    if kind == 2:
        return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    small = [value % 2**32 for value in INTEGERS]
    version, epoch, rank = rng.choice([1, 2, 9]), rng.choice([0, 4, 5, 6, *small]), rng.choice([0, 1, 2, 3, *small])
    if kind == 3:
        return pack_hello(Hello(version, epoch, rank, token_hash("guess")))
    if kind == 4 and (version, epoch) != (2, EPOCH):
        return pack_hello(Hello(version, epoch, rank, token_hash(TOKEN)))
    hello = pack_hello(Hello(2, EPOCH, 1, token_hash(TOKEN)))
    changed = mutate_bytes(rng, hello)
    return changed if changed[:HELLO_SIZE] != hello else hello[: rng.randrange(HELLO_SIZE)]


def visit(rng: random.Random, address: tuple[str, int], stay: ExitStack) -> None:
    """One stranger comes, speaks, and stays, leaves or breaks off."""
    sock = stay.enter_context(socket.create_connection(address, timeout=LONG))
    with suppress(OSError):  # it may be refused while it speaks
        sock.sendall(stranger(rng))
        end = rng.randrange(4)
        if end == 0:
            sock.shutdown(socket.SHUT_WR)
        elif end == 1:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            sock.close()


def knock(address: str, rank: int) -> WorkerLink:
    """A real worker comes."""
    return WorkerLink.connect(address, rank=rank, epoch=EPOCH, token=TOKEN, deadline=monotonic() + LONG, closed=never_closed)


def use(head: HeadLinks, workers: list[WorkerLink]) -> None:
    """One frame arrives at every worker."""
    frame = encode(Ping(), BATCH, epoch=EPOCH, step=0)
    head.send(frame, monotonic() + LONG)
    for worker in workers:
        assert worker.receive(monotonic() + LONG) == frame
        worker.close()
    head.close()


def case(rng: random.Random) -> None:
    """One epoch's accept. In one of twenty, three hundred strangers come first and stay without a word."""
    refused: list[str] = []
    with ExitStack() as stay, Listener() as listener, ThreadPoolExecutor(3) as pool:
        address = split_host_port(listener.address)
        accepted = pool.submit(
            listener.accept,
            world=WORLD,
            epoch=EPOCH,
            token=TOKEN,
            deadline=monotonic() + LONG,
            closed=never_closed,
            on_refused=refused.append,
        )
        if rng.randrange(20) == 0:
            for _ in range(300):
                stay.enter_context(socket.create_connection(address, timeout=LONG))
        workers = []
        for rank in rng.sample([1, 2], 2):
            for _ in range(rng.randrange(8)):
                visit(rng, address, stay)
            workers.append(pool.submit(knock, listener.address, rank))
        for _ in range(rng.randrange(3)):
            with suppress(OSError):  # the epoch may be complete
                visit(rng, address, stay)
        use(accepted.result(LONG), [worker.result(LONG) for worker in workers])
    assert all(len(line) < 1000 for line in refused)
