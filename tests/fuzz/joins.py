"""The coordinator's door: a head with fake engines, strangers at its join address, and a real worker daemon among them."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import struct
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from msgspec import inspect as mi

from ep_runtime.supervise.coordinator import package_version
from protocol.codec import encode, pack_blob
from protocol.messages import MESSAGES_VERSION, Join, ToCoordinator
from tests.fuzz.decoders import message_bytes
from tests.fuzz.values import mutate_bytes, mutate_tree, packed, valid
from tests.support.ports import free_port
from tests.support.supervised import WAIT_SECONDS, Processes, assert_gone, fake_environment, model_in

TOKEN = "0123456789abcdef"
RESET = struct.pack("ii", 1, 0)
CROWD = 150
"""Strangers who stay without a word: more than the coordinator holds."""
HEAVY, HEAVY_BYTES = 40, 2 << 20
"""Strangers who begin a message of 64 MiB, and what each of them sends of it."""
GROWTH_BYTES = 48 << 20
_JOIN = mi.type_info(Join)


def words(rng: random.Random) -> bytes:
    """What a stranger says: never the right token."""
    kind = rng.randrange(7)
    if kind == 0:
        return rng.choice([b"", b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(300)])
    if kind == 1:
        return struct.pack("<II", rng.choice([0, 1 << 26, (1 << 26) + 1, 2**32 - 1]), 0) + bytes(rng.randrange(100))
    if kind == 2:
        return pack_blob(message_bytes(rng, ToCoordinator)) * rng.choice([1, 50])
    join = Join(
        token=rng.choice(["", "guess", TOKEN[:-1], TOKEN + "\0", "é" * 20]),
        host="h" * rng.choice([1, 1000]),
        boot="b",
        rank=rng.choice([None, 0, 1, 2**40]),
        device="cpu",
        package=package_version(),
    )
    if kind <= 4:
        return pack_blob(encode(join))
    if kind == 5:
        return pack_blob(packed(mutate_tree(rng, [MESSAGES_VERSION, valid(rng, _JOIN)])))
    return mutate_bytes(rng, pack_blob(encode(join)))


def visit(rng: random.Random, address: tuple[str, int], stay: ExitStack) -> None:
    """One stranger comes, speaks, and stays or leaves."""
    sock = stay.enter_context(socket.create_connection(address, timeout=WAIT_SECONDS))
    with suppress(OSError):  # it may be turned away while it speaks
        sock.sendall(words(rng))
        if rng.random() < 0.3:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        if rng.random() < 0.5:
            sock.close()


def load_up(address: tuple[str, int], stay: ExitStack) -> None:
    """Many strangers begin long messages before they have said who they are."""
    for _ in range(HEAVY):
        sock = stay.enter_context(socket.create_connection(address, timeout=WAIT_SECONDS))
        with suppress(OSError):
            sock.sendall(struct.pack("<II", 1 << 26, 0))
            sock.sendall(bytes(HEAVY_BYTES))


def case(rng: random.Random) -> None:
    """One head: strangers before, while and after the worker joins. The epoch runs, and all end in order."""
    folder = Path(tempfile.mkdtemp(prefix="ep-"))
    processes = Processes()
    address = ("127.0.0.1", free_port())
    environment = fake_environment(folder, {"EP_RUNTIME_TOKEN": TOKEN})
    flags = ["--device=cpu", "--port=0", "--world-size=2", f"--coordinator-host={address[0]}", f"--coordinator-port={address[1]}"]
    try:
        with ExitStack() as stay:
            head = processes.start([f"--model={model_in(folder)}", *flags], environment)
            processes.until(r"fake engine 0 pid (\d+)")
            before = psutil.Process(head.pid).memory_info().rss
            kind = rng.randrange(3)
            for _ in range(CROWD if kind == 0 else 0):
                stay.enter_context(socket.create_connection(address, timeout=WAIT_SECONDS))
            if kind == 1:
                load_up(address, stay)
            for _ in range(rng.randrange(30)):
                visit(rng, address, stay)
            worker = processes.start(["--head", f"{address[0]}:{address[1]}"], environment)
            for _ in range(rng.randrange(60)):
                visit(rng, address, stay)
            processes.until(r"epoch 1 runs on 2 ranks")
            for _ in range(rng.randrange(20)):
                visit(rng, address, stay)
            grown = psutil.Process(head.pid).memory_info().rss - before
            assert grown < GROWTH_BYTES, f"the head grew by {grown >> 20} MiB"
            children = psutil.Process(head.pid).children(recursive=True) + psutil.Process(worker.pid).children(recursive=True)
            head.send_signal(signal.SIGTERM)
            assert [head.wait(WAIT_SECONDS), worker.wait(WAIT_SECONDS)] == [0, 0]
            assert_gone(children)
        output = processes.read_rest()
        assert "Traceback" not in output, output
        assert TOKEN not in output.replace(TOKEN + "\0", ""), "the token is in the log"
    finally:
        processes.close()
        shutil.rmtree(folder)
