"""An engine without a model: a thread that speaks the frontend's real messages over ZeroMQ and answers from a script.

One loop turn is one step: every running sequence gets one token. `hold()` makes steps cost credits, which `step(n)` gives, so that
a test decides how far sequences are; `wait_for` waits for messages of the frontend. Nothing sleeps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import zmq

from protocol.codec import decode, encode
from protocol.messages import Abort, EpochEnded, EpochReady, Results, SequenceUpdate, Submit, Takeover, ToEngine, ToFrontend
from tests.support.fake_sequences import FakeSequences, Script

T = TypeVar("T")


def epoch_ready(epoch: int, *, eos: int, vocab_size: int, **facts: Any) -> EpochReady:
    """An announcement; two ranks and a context of 512 tokens unless told otherwise."""
    usual = {"max_model_len": 512, "max_num_seqs": 8, "block_size": 16, "world": 2, "forward_mode": "reference", "inputs": ["text"]}
    return EpochReady(epoch=epoch, vocab_size=vocab_size, stop_token_ids=[eos], **{**usual, **facts})


class FakeEngine:
    """The engine of one epoch. `script(submit)` gives the whole output, an end token included if it ends by itself."""

    def __init__(
        self, runtime_dir: Path, epoch: int, script: Script, *, eos: int, vocab_size: int, held: bool = False, **ready: Any
    ) -> None:
        self.epoch = epoch
        self.sequences = FakeSequences(epoch, script, eos=eos)
        self._ready = epoch_ready(epoch, eos=eos, vocab_size=vocab_size, **ready)
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(f"ipc://{runtime_dir}/engine-{epoch}")
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set(zmq.LINGER, 1000)
        self._outbox.connect(f"ipc://{runtime_dir}/frontend")
        self._control = self._context.socket(zmq.PAIR)
        self._control.bind(f"inproc://control-{id(self)}")
        self._caller = self._context.socket(zmq.PAIR)
        self._caller.connect(f"inproc://control-{id(self)}")
        self._commands: deque[tuple[Any, ...]] = deque()
        self._seen = threading.Condition()
        self.received: list[ToEngine] = []
        self.takeovers: list[Takeover] = []
        self._credits: int | None = 0 if held else None
        self._thread = threading.Thread(target=self._run, name=f"fake-engine-{epoch}", daemon=True)

    def start(self) -> FakeEngine:
        """Announce the epoch and serve."""
        self._thread.start()
        return self

    def announce(self) -> None:
        """Say again that the epoch is ready."""
        self.send(self._ready)

    def stop(self, reason: str = "stopped", announce: bool = True, **fields: Any) -> None:
        """End the epoch; EpochEnded (not final, and with these fields) says so if `announce`."""
        if self._thread.is_alive():
            ended = EpochEnded(self.epoch, reason, **{"final": False, **fields})
            self._command(("stop", encode(ended) if announce else None))
            self._thread.join(10)
            self._caller.close(0)
            self._context.term()

    def hold(self) -> None:
        """From now on no step runs without a credit."""
        self._command(("credits", 0))

    def step(self, count: int) -> None:
        """Allow `count` more steps (that have something to do)."""
        self._command(("credits", count))

    def release(self) -> None:
        """Steps are free again."""
        self._command(("credits", None))

    def send(self, message: ToFrontend) -> None:
        """Send any message, of any epoch."""
        self._command(("send", encode(message)))

    def send_raw(self, data: bytes) -> None:
        """Send bytes that may be no message."""
        self._command(("send", data))

    def report(self, step: int, ranks: list[int]) -> None:
        """Send results without updates."""
        self.send(self.sequences.results([], step, ranks))

    def refuse(self, update: SequenceUpdate) -> None:
        """Answer the next submitted sequence with this terminal update (its id is filled in)."""
        self._command(("refuse", update))

    def fail(self, update: SequenceUpdate) -> None:
        """End a running sequence with this terminal update."""
        self._command(("fail", update))

    def deaf(self, deaf: bool) -> None:
        """While deaf, as in a long step, the engine reads nothing that it is sent."""
        self._command(("deaf", deaf))

    def wait_for(self, find: Callable[[list[ToEngine]], T | None], timeout: float = 60) -> T:
        """The first result of `find(received)` that is not None."""
        with self._seen:
            found = self._seen.wait_for(lambda: find(self.received), timeout)
            assert found is not None, f"not seen within {timeout} s; received {self.received}"
            return found

    def submits(self, count: int) -> list[Submit]:
        """The first `count` submissions."""

        def find(messages: list[ToEngine]) -> list[Submit] | None:
            submits = [message for message in messages if isinstance(message, Submit)]
            return submits[:count] if len(submits) >= count else None

        return self.wait_for(find)

    def aborted(self, request_id: str) -> None:
        """Wait until the frontend has aborted this sequence."""
        self.wait_for(lambda ms: True if any(isinstance(m, Abort) and request_id in m.request_ids for m in ms) else None)

    def taken_over(self, count: int) -> None:
        """Wait until so many frontends have introduced themselves."""
        with self._seen:
            assert self._seen.wait_for(lambda: len(self.takeovers) >= count, 60)

    def clear(self) -> None:
        """Forget what was received."""
        with self._seen:
            self.received.clear()

    def _command(self, command: tuple[Any, ...]) -> None:
        self._commands.append(command)
        self._caller.send(b"")

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self.sequences)

    # The thread's side

    def _run(self) -> None:
        self._publish(self._ready)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._control, zmq.POLLIN)
        while True:
            events = dict(self._poller.poll(0 if self._can_step() else None))
            if self._control in events and not self._obey_all():
                break
            while self._inbox in events:
                try:
                    self._take(decode(ToEngine, self._inbox.recv(zmq.NOBLOCK)))
                except zmq.Again:
                    break
            if self._can_step():
                self._step()
        for socket in (self._inbox, self._control):
            socket.close(0)
        self._outbox.close()

    def _obey_all(self) -> bool:
        self._control.recv()
        return self._obey(self._commands.popleft())

    def _obey(self, command: tuple[Any, ...]) -> bool:
        match command:
            case ("credits", 0):
                self._credits = 0
            case ("credits", None):
                self._credits = None
            case ("credits", int(count)):
                self._credits = (self._credits or 0) + count
            case ("send", data):
                self._outbox.send(data)
            case ("fail", update):
                self._publish(self.sequences.end(update))
            case ("refuse", update):
                self.sequences.refuse(update)
            case ("deaf", deaf):
                self._poller.register(self._inbox, 0 if deaf else zmq.POLLIN)
            case ("stop", ended):
                if ended is not None:
                    self._outbox.send(ended)
                return False
        return True

    def _take(self, message: ToEngine) -> None:
        answer = self.sequences.take(message)
        if answer is not None:
            self._publish(answer)
        with self._seen:
            if isinstance(message, Takeover):
                self.takeovers.append(message)
            else:
                self.received.append(message)
            self._seen.notify_all()

    def _can_step(self) -> bool:
        return self._credits != 0 and bool(self.sequences.due())

    def _step(self) -> None:
        if self._credits is not None:
            self._credits -= 1
        self._publish(self.sequences.step())

    def _publish(self, message: Results | EpochReady) -> None:
        self._outbox.send(encode(message))
