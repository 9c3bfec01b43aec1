"""The head's port over real ZeroMQ sockets: nothing is lost, nothing grows without bound, nothing ends the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import zmq

from ep_runtime.engine.port import FrontendLost, Received, Undecodable, ZmqPort, salvage
from protocol.codec import decode, encode
from protocol.messages import (
    MESSAGES_VERSION,
    Abort,
    EngineStats,
    Mask,
    Results,
    SamplingParams,
    SequenceUpdate,
    Submit,
    ToFrontend,
)

STATS = EngineStats(*([0] * 11), ranks=[0])


def results(number: int) -> Results:
    return Results(1, [SequenceUpdate(f"request {number}", [number] * 500)], STATS)


def until(true: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
    """Run `meanwhile` until it is so, for at most a minute."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        meanwhile()


class Frontend:
    """Both of a frontend's sockets."""

    def __init__(self, context: zmq.Context[Any], folder: Path) -> None:
        self.inbox = context.socket(zmq.PULL)
        self.inbox.setsockopt(zmq.RCVHWM, 4)
        self.inbox.bind(f"ipc://{folder}/frontend")
        self.outbox = context.socket(zmq.PUSH)
        self.outbox.connect(f"ipc://{folder}/engine-1")

    def read(self, meanwhile: Callable[[], None] = lambda: None) -> str:
        """The request of the next results. `meanwhile` runs while they are waited for: a head never stops serving its port."""
        until(lambda: bool(self.inbox.poll(50)), meanwhile)
        message = decode(ToFrontend, self.inbox.recv())
        assert isinstance(message, Results)
        return message.updates[0].request_id

    def send(self, *data: bytes) -> None:
        for part in data:
            self.outbox.send(part)

    def close(self) -> None:
        self.inbox.close(0)
        self.outbox.close(0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="port") as name:
        yield Path(name)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[[], Frontend]]:
    """Starts a frontend; all of them end with the test."""
    context: zmq.Context[Any] = zmq.Context()
    started: list[Frontend] = []

    def start() -> Frontend:
        started.append(Frontend(context, folder))
        return started[-1]

    yield start
    for frontend in started:
        frontend.close()
    context.term()


@pytest.fixture
def port(folder: Path) -> Iterator[ZmqPort]:
    port = ZmqPort(folder, 1, send_messages=4)
    yield port
    port._outbox.setsockopt(zmq.LINGER, 0)
    port.close()


def receive(port: ZmqPort, count: int) -> list[Received]:
    """The next `count` things that arrive."""
    got: list[Received] = []
    for _ in range(100):
        got += port.receive(0.1)
        if len(got) >= count:
            break
    return got


def fill(port: ZmqPort, start: int = 0) -> int:
    """Publish until the way is full; the number of the next message."""
    while not port.congested:
        port.publish(results(start))
        start += 1
        assert start < 10_000
    return start


def test_a_frontend_that_is_away_gets_everything_in_order_when_it_comes(port: ZmqPort, start: Callable[[], Frontend]) -> None:
    for number in range(20):
        port.publish(results(number))
    assert port.congested
    assert port.receive(0.0) == []
    frontend = start()
    for number in range(20):
        port.receive(0.05)
        assert frontend.read() == f"request {number}"
    port.receive(0.0)
    assert not port.congested


def test_a_frontend_that_is_stuck_congests_the_port_until_it_reads(port: ZmqPort, start: Callable[[], Frontend]) -> None:
    frontend = start()
    frontend.send(encode(Abort(["early"])))
    assert receive(port, 1) == [Abort(["early"])]
    sent = fill(port)
    # What the sockets take comes on top of both bounds, in a thread's own time: it is of the order of a hundred kilobytes.
    full = 0
    while full < 10:
        assert port.receive(0.05) == []
        full = full + 1 if port.congested else 0
        sent = fill(port, sent)
    frontend.send(encode(Abort(["late"])))
    got: list[Received] = []

    def pump() -> None:
        arrived = port.receive(0.05)
        assert not (arrived and port.congested), "what is sent to a congested head waits in the sockets"
        got.extend(arrived)

    pump()
    for number in range(sent):
        assert frontend.read(pump) == f"request {number}"
    until(lambda: bool(got), pump)
    assert not port.congested
    assert got == [Abort(["late"])]


def test_the_loss_of_a_frontend_is_told_before_what_the_next_one_sends(port: ZmqPort, start: Callable[[], Frontend]) -> None:
    first = start()
    port.publish(results(0))
    assert first.read() == "request 0"
    assert port.receive(0.0) == []
    first.close()
    assert receive(port, 1) == [FrontendLost()]
    second = start()
    port.publish(results(1))
    assert second.read() == "request 1"
    second.send(encode(Abort(["a"])))
    assert receive(port, 1) == [Abort(["a"])]


def submit_like(**fields: Any) -> bytes:
    return msgspec.msgpack.encode((MESSAGES_VERSION, {"type": "Submit", "request_id": "a", **fields}))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", None),
        (b"junk", None),
        (msgspec.msgpack.encode((MESSAGES_VERSION, {"type": "Abort", "request_ids": "a"})), None),
        (msgspec.msgpack.encode((MESSAGES_VERSION, {"type": "Mask", "request_id": 7})), None),
        (encode(Submit("a", "a", [1], SamplingParams(seed=0, max_tokens=1)))[:-1], None),
        (b"\x92\x02" + b"\x81\xa1a" * 5000 + b"\x01", None),
        (submit_like(prompt=[-1]), ("a", "Submit")),
        (submit_like(prompt=[1], unknown=3), ("a", "Submit")),
        (msgspec.msgpack.encode((MESSAGES_VERSION + 1, {"type": "Submit", "request_id": "a"})), ("a", "Submit")),
        (msgspec.msgpack.encode((MESSAGES_VERSION, {"type": "Mask", "request_id": "a", "index": -1})), ("a", "Mask")),
        (msgspec.msgpack.encode((MESSAGES_VERSION, {"type": 3, "request_id": "a"})), ("a", "")),
    ],
)
def test_a_broken_message_is_counted_and_names_its_request_if_it_can(
    port: ZmqPort, start: Callable[[], Frontend], data: bytes, expected: tuple[str, str] | None
) -> None:
    frontend = start()
    frontend.send(data, encode(Mask("b", 0, b"")))
    *broken, good = receive(port, 1 if expected is None else 2)
    assert good == Mask("b", 0, b"")
    assert port.undecodable == 1
    if expected is None:
        assert broken == []
        assert salvage(data, "") is None
    else:
        (found,) = broken
        assert isinstance(found, Undecodable)
        assert (found.request_id, found.kind) == expected
        assert found.fault.startswith("message")
