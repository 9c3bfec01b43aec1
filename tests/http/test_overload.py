"""More clients than can be served: what waits, what is refused, and that nothing is left of it afterwards."""

from __future__ import annotations

import contextlib
import json
import random
import select
import signal
import socket
import time
from collections import Counter

import psutil

from tests.http.conftest import TEXT, Stack, wait_metric
from tests.http.test_disconnect import open_request
from tests.http.test_lifecycle import Background, MakeStack
from tests.http.test_long_prompts import COUNTING, encoded

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
WAITING = 300
FILES = 200


def connect(stack: Stack, timeout: float = 30) -> socket.socket:
    """A bare connection to the frontend."""
    host, port = stack.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=timeout)


def read_all(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    with sock:
        return b"".join(iter(lambda: sock.recv(65536), b""))


def wait_files(process: psutil.Process, most: int) -> None:
    """Until the process has at most so many descriptors: it closes them in its own time, and nothing says when."""
    deadline = time.monotonic() + 30
    while process.num_fds() > most:
        assert time.monotonic() < deadline, f"{process.num_fds()} descriptors, {most} before"


def test_connections_wait_while_the_frontend_stands_still(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    process = stack.server.process
    process.send_signal(signal.SIGSTOP)
    waiting = [connect(stack) for _ in range(WAITING)]
    for sock in waiting:
        sock.sendall(HEALTH)
    process.send_signal(signal.SIGCONT)
    assert Counter(read_all(sock)[:12] for sock in waiting) == {b"HTTP/1.1 200": WAITING}


def test_more_connections_than_files_end_nothing(make_stack: MakeStack) -> None:
    """Those beyond the limit of open files wait; the server serves on, and takes them when others have left."""
    stack = make_stack(before=f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))", header_seconds=60)
    engine = stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    engine.hold()
    running = Background(stack.chat)
    engine.submits(1)
    idle = [connect(stack) for _ in range(2 * FILES)]
    late = connect(stack)
    late.sendall(HEALTH)
    engine.release()
    assert running.result().json()["choices"][0]["message"]["content"] == TEXT
    for sock in idle:
        sock.close()
    assert read_all(late).startswith(b"HTTP/1.1 200")
    assert stack.chat().status_code == 200


def test_a_request_head_is_bounded(stack: Stack) -> None:
    sock = connect(stack)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        for _ in range(4096):
            sock.sendall(b"X-Long: " + b"x" * 1000 + b"\r\n")
    with contextlib.suppress(ConnectionResetError):
        assert read_all(sock).startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    assert stack.http.get("/health").status_code == 200


def test_requests_behind_an_unfinished_one_are_left_unread(stack: Stack) -> None:
    """A client that sends request after request on one connection fills buffers of bounded size and then has to wait."""
    stack.engine.hold()
    process = psutil.Process(stack.server.process.pid)
    sock = open_request(stack)
    stack.engine.submits(1)
    before = process.memory_info().rss
    sock.setblocking(False)
    sent = 0
    while select.select([], [sock], [], 0.5)[1]:
        sent += sock.send(HEALTH * 1000)
        assert sent < 64 << 20
    grown = process.memory_info().rss - before
    sock.close()
    assert grown < 8 << 20
    # What is left unread hides that the client is gone: the request it had is computed to its end.
    stack.engine.release()
    wait_metric(stack, "ep_journal_sequences", lambda value: value == 0)


def test_a_flood_is_answered_one_by_one(make_stack: MakeStack) -> None:
    """Every request gets its answer or a 429 that says when to come again; as many are taken as the queue holds."""
    stack = make_stack(max_queue=20)
    engine = stack.engine_of(1, max_num_seqs=4)
    stack.server.wait_line("out", "ready")
    engine.hold()
    flood = [open_request(stack, stream=number % 3 == 0) for number in range(200)]
    engine.submits(24)
    ready, refused = set(flood), 0
    while refused < 176:
        readable, _, _ = select.select(list(ready), [], [], 30)
        assert readable, f"{refused} of 176 were refused"
        for sock in readable:
            ready.discard(sock)
            head = sock.recv(65536).decode()
            assert head.startswith("HTTP/1.1 429"), head
            assert "\r\nretry-after: " in head
            sock.close()
            refused += 1
    engine.release()
    for sock in ready:
        assert sock.recv(12) == b"HTTP/1.1 200"
        sock.close()
    wait_metric(stack, "ep_journal_sequences", lambda value: value == 0)
    assert stack.chat().status_code == 200


def test_what_the_queue_has_no_room_for_is_not_tokenized(make_stack: MakeStack) -> None:
    """Neither when the queue is full already, nor when all come at once and the prompts of those before are in the making."""
    stack = make_stack(before=COUNTING, max_queue=2)
    engine = stack.engine_of(1, max_num_seqs=2)
    stack.server.wait_line("out", "ready")
    engine.hold()
    messages = [{"role": "user", "content": TEXT * 20}]
    flood = [open_request(stack, messages=messages) for _ in range(60)]
    engine.submits(4)
    refused: list[socket.socket] = []
    while len(refused) < 56:
        readable, _, _ = select.select([sock for sock in flood if sock not in refused], [], [], 30)
        assert readable
        for sock in readable:
            assert sock.recv(12) == b"HTTP/1.1 429"
            refused.append(sock)
    assert encoded(stack) == 4
    for _ in range(20):
        assert stack.complete(prompt=TEXT * 20).status_code == 429
        assert stack.http.post("/v1/chat/completions", json={"messages": messages}).status_code == 429
    assert encoded(stack) == 4
    engine.release()
    for sock in flood:
        if sock not in refused:
            assert sock.recv(12) == b"HTTP/1.1 200"
        sock.close()
    wait_metric(stack, "ep_journal_sequences", lambda value: value == 0)
    # A prompt that fails gives its place back.
    assert {stack.complete(prompt="").status_code for _ in range(10)} == {400}
    assert stack.complete(n=4).status_code == 200


def test_a_storm_of_clients_that_leave_leaves_nothing_behind(make_stack: MakeStack) -> None:
    """Connections that close before, while and after they are answered: no sequence, no descriptor and no journal entry stays."""
    stack = make_stack(max_queue=400)
    engine = stack.engine_of(1, max_num_seqs=8)
    stack.server.wait_line("out", "ready")
    assert stack.chat().status_code == 200
    process = psutil.Process(stack.server.process.pid)
    files = process.num_fds()
    rng = random.Random(5)
    open_now: list[socket.socket] = []
    engine.hold()
    for _ in range(300):
        open_now.append(open_request(stack, stream=rng.random() < 0.5, n=rng.choice([1, 1, 2]), max_tokens=rng.choice([1, 5, 30])))
        if rng.random() < 0.4:
            engine.step(rng.randrange(1, 4))
        while len(open_now) > rng.randrange(12):
            leaver = open_now.pop(rng.randrange(len(open_now)))
            if rng.random() < 0.2:
                leaver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            leaver.close()
    for sock in open_now:
        sock.close()
    engine.release()
    wait_metric(stack, "ep_journal_sequences", lambda value: value == 0)
    wait_files(process, files)
    assert stack.chat().json()["choices"][0]["message"]["content"] == TEXT
    assert engine.running == 0
    assert json.loads(stack.http.get("/ready").text)["status"] == "ready"
