"""An engine without a model: a thread that speaks the frontend's real messages over ZeroMQ and answers from a script.

One loop turn is one step: every running sequence gets one token. `hold()` makes steps cost credits, which `step(n)` gives, so that
a test decides how far sequences are; `wait_for` waits for messages of the frontend. Nothing sleeps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from protocol.codec import decode, encode
from protocol.messages import (
    Abort,
    EngineStats,
    EpochEnded,
    EpochReady,
    Mask,
    Results,
    SequenceUpdate,
    Submit,
    ToEngine,
    ToFrontend,
    TokenLogprobs,
)

T = TypeVar("T")
Script = Callable[[Submit], list[int]]


@dataclass
class Running:
    """A submitted sequence; `script` are its tokens, the replayed ones included, over and over."""

    submit: Submit
    script: list[int]
    generated: int
    masks: dict[int, bytes] = field(default_factory=dict)


def fake_logprobs(token: int, alternatives: int) -> TokenLogprobs:
    """Deterministic: the token itself at -0.25, then its successors at -1.5, -2.5, ..."""
    ids = [token + offset for offset in range(alternatives)]
    return TokenLogprobs(-0.25, 1, ids, [-0.25 if not offset else -0.5 - offset for offset in range(alternatives)])


class FakeEngine:
    """The engine of one epoch. `script(submit)` gives the whole output, an end token included if it ends by itself."""

    def __init__(
        self, runtime_dir: Path, epoch: int, script: Script, *, eos: int, vocab_size: int, held: bool = False, **ready: Any
    ) -> None:
        self.epoch = epoch
        self._script = script
        self._eos = eos
        facts = {
            "max_model_len": 512,
            "max_num_seqs": 8,
            "block_size": 16,
            "world": 2,
            "forward_mode": "reference",
            "inputs": ["text"],
        }
        self._ready = EpochReady(epoch=epoch, vocab_size=vocab_size, stop_token_ids=[eos], **{**facts, **ready})
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
        self._refusal: SequenceUpdate | None = None
        self._running: dict[str, Running] = {}
        self._credits: int | None = 0 if held else None
        self._steps = 0
        self._thread = threading.Thread(target=self._run, name=f"fake-engine-{epoch}", daemon=True)

    def start(self) -> FakeEngine:
        """Announce the epoch and serve."""
        self._thread.start()
        return self

    def announce(self) -> None:
        """Say again that the epoch is ready."""
        self.send(self._ready)

    def stop(self, reason: str = "stopped", final: bool = False, announce: bool = True) -> None:
        """End the epoch, saying so if `announce`."""
        if self._thread.is_alive():
            self._command(("stop", reason, final, announce))
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
        self.send(Results(self.epoch, [], self._stats(step, ranks)))

    def refuse(self, update: SequenceUpdate) -> None:
        """Answer the next submitted sequence with this terminal update (its id is filled in)."""
        self._command(("refuse", update))

    def fail(self, update: SequenceUpdate) -> None:
        """End a running sequence with this terminal update."""
        self._command(("fail", update))

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
        return len(self._running)

    # The thread's side

    def _run(self) -> None:
        self._publish(self._ready)
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._control, zmq.POLLIN)
        while True:
            busy = self._can_step()
            events = dict(poller.poll(0 if busy else None))
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
                self._running.pop(update.request_id)
                self._publish(Results(self.epoch, [update], self._stats(self._steps, [self._steps] * 2)))
            case ("refuse", update):
                self._refusal = update
            case ("stop", reason, final, announce):
                if announce:
                    self._publish(EpochEnded(self.epoch, reason, final))
                return False
        return True

    def _take(self, message: ToEngine) -> None:
        match message:
            case Submit() if self._refusal is not None:
                update = msgspec.structs.replace(self._refusal, request_id=message.request_id)
                self._refusal = None
                self._publish(Results(self.epoch, [update], self._stats(self._steps, [self._steps] * 2)))
            case Submit():
                running = Running(message, self._script(message), len(message.generated))
                if message.sampling.grammar:
                    running.masks[running.generated] = message.mask
                self._running[message.request_id] = running
            case Mask():
                if message.request_id in self._running:
                    self._running[message.request_id].masks[message.index] = message.mask
            case Abort():
                for request_id in message.request_ids:
                    self._running.pop(request_id, None)
        with self._seen:
            self.received.append(message)
            self._seen.notify_all()

    def _due(self) -> list[Running]:
        return [seq for seq in self._running.values() if not seq.submit.sampling.grammar or seq.generated in seq.masks]

    def _can_step(self) -> bool:
        return self._credits != 0 and bool(self._due())

    def _step(self) -> None:
        if self._credits is not None:
            self._credits -= 1
        self._steps += 1
        updates = [self._advance(sequence) for sequence in self._due()]
        for update in updates:
            if update.finish is not None:
                del self._running[update.request_id]
        self._publish(Results(self.epoch, updates, self._stats(self._steps, [self._steps] * 2)))

    def _advance(self, sequence: Running) -> SequenceUpdate:
        submit, sampling = sequence.submit, sequence.submit.sampling
        token = sequence.script[sequence.generated % len(sequence.script)]
        if sampling.grammar:
            token = self._allowed(token, sequence.masks.pop(sequence.generated))
        first = sequence.generated == len(submit.generated)
        sequence.generated += 1
        stops = token in sampling.stop_token_ids or (token == self._eos and not sampling.ignore_eos)
        finish = "stop" if stops else ("length" if sequence.generated >= sampling.max_tokens else None)
        prompt_logprobs = None
        if first and sampling.prompt_logprobs is not None:
            prompt_logprobs = [fake_logprobs(other, sampling.prompt_logprobs) for other in submit.prompt[1:]]
        return SequenceUpdate(
            request_id=submit.request_id,
            tokens=[token],
            logprobs=None if sampling.logprobs is None else [fake_logprobs(token, sampling.logprobs)],
            finish=finish,
            stop_token=token if stops else None,
            prompt_start=1 if prompt_logprobs is not None else 0,
            prompt_logprobs=prompt_logprobs,
            cached=3 if first else 0,
        )

    def _allowed(self, wanted: int, mask: bytes) -> int:
        """The scripted token if the mask allows it, else the end token, else the lowest allowed."""
        bits = int.from_bytes(mask, "little")
        for token in (wanted, self._eos):
            if bits >> token & 1:
                return token
        assert bits, "the mask allows no token"
        return (bits & -bits).bit_length() - 1

    def _stats(self, step: int, ranks: list[int]) -> EngineStats:
        running = len(self._running)
        return EngineStats(
            step=step,
            running=running,
            waiting=0,
            free_blocks=100,
            total_blocks=128,
            free_slots=8 - min(8, running),
            total_slots=8,
            preemptions=0,
            prompt_tokens=10,
            generated_tokens=step,
            cached_tokens=3,
            ranks=ranks,
        )

    def _publish(self, message: ToFrontend) -> None:
        self._outbox.send(encode(message))
