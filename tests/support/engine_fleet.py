"""Real engine processes at the ends of their control sockets: the test is supervisor, coordinator and frontend of all of them."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import zmq

from ep_runtime.config import Facts, RuntimeConfig, resolve
from protocol.codec import decode, encode
from protocol.errors import EpLinkLost, EpPeerGone
from protocol.message_socket import MessageSocket
from protocol.messages import (
    BeginEpoch,
    EndEpoch,
    EpochLeft,
    EpochOpened,
    EpochReady,
    FromEngineControl,
    Loaded,
    Message,
    OpenEpoch,
    Ready,
    Report,
    Results,
    SamplingParams,
    Stop,
    Submit,
    ToFrontend,
    Welcome,
)
from protocol.progress import ProgressPage
from tests.support.python_path import python_path

WAIT_SECONDS = 60.0
ENGINE = "ep_runtime.engine.main"
M = TypeVar("M", bound=Message)


def settings_of(folder: Path, world: int, device: str = "cpu", **settings: Any) -> RuntimeConfig:
    """A small configuration of an engine of such a world."""
    sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64} | settings
    config = RuntimeConfig(model=str(folder), device=device, **sizes)  # type: ignore[arg-type]
    config = resolve(config, Facts(gpus=0, cores=1, world=world, local_world=world))
    return config.model_copy(update={"threads": 1})


class EngineProcess:
    """One engine process. It waits for its Welcome until `welcome` says it: until then it is a standby."""

    def __init__(
        self,
        runtime_dir: Path,
        *,
        module: str = ENGINE,
        device_index: int = 0,
        local_ranks: int = 1,
        patience: float = WAIT_SECONDS,
    ) -> None:
        self.page, progress = ProgressPage.create()
        ours, theirs = socket.socketpair()
        arguments = [f"--control-fd={theirs.fileno()}", f"--progress-fd={progress}", f"--runtime-dir={runtime_dir}"]
        arguments += [f"--device-index={device_index}", f"--local-ranks={local_ranks}"]
        environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "CHAOS_DIR": str(runtime_dir)}
        self._log = (runtime_dir / f"log-{time.monotonic_ns()}").open("w+b")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                pass_fds=[theirs.fileno(), progress],
                stdout=self._log,
                stderr=self._log,
                env=environment,
            )
        os.close(progress)
        self.control = MessageSocket(ours, FromEngineControl, peer="the engine")
        self.rank = 0
        self.patience = patience
        self.reports: list[Report] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    def welcome(self, rank: int, world: int, config: RuntimeConfig) -> None:
        self.rank = rank
        self.send(Welcome(rank=rank, world=world, config=config.to_json()))

    def send(self, message: Message) -> None:
        self.control.send(message, WAIT_SECONDS)

    def expect(self, kind: type[M], epoch: int | None = None) -> M:
        """The next message but reports, which are kept: of this kind, and epoch."""
        message = self._receive()
        while isinstance(message, Report):
            self.reports.append(message)
            message = self._receive()
        assert isinstance(message, kind), f"rank {self.rank}: {message}, expected {kind.__name__}\n{self.log()}"
        assert epoch is None or message.epoch == epoch, f"rank {self.rank}: {message}, expected epoch {epoch}"  # type: ignore[attr-defined]
        return message

    def report(self) -> Report:
        """The next message, which is a report."""
        if not self.reports:
            message = self._receive()
            assert isinstance(message, Report), f"rank {self.rank}: {message}\n{self.log()}"
            return message
        return self.reports.pop(0)

    def _receive(self) -> Any:
        try:
            return self.control.recv(self.patience)
        except EpLinkLost as error:
            raise type(error)(f"rank {self.rank}: {error}\n{self.log()}") from error

    def leaves(self, epoch: int) -> float:
        """End the epoch; the seconds until the one answer."""
        started = time.monotonic()
        self.send(EndEpoch(epoch=epoch, reason="the test ends it"))
        self.expect(EpochLeft, epoch)
        return time.monotonic() - started

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_SECONDS)

    def exit_status(self) -> int:
        return self.process.wait(WAIT_SECONDS)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()
        self._log.close()


@dataclass
class Request:
    """A greedy request, and what it has got in all epochs together."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None

    def submit(self, request_id: str) -> Submit:
        """For the next epoch: its tokens so far are replayed."""
        sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True)
        return Submit(request_id=request_id, group=request_id, prompt=self.prompt, sampling=sampling, generated=list(self.tokens))


class Frontend:
    """The frontend's sockets. `requests` are all that were submitted, by id."""

    def __init__(self, runtime_dir: Path, patience: float = WAIT_SECONDS) -> None:
        self.runtime_dir = runtime_dir
        self.requests: dict[str, Request] = {}
        self.ready: EpochReady | None = None
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVTIMEO, int(1000 * patience))
        self._inbox.bind(f"ipc://{runtime_dir}/frontend")
        self._outbox = self._context.socket(zmq.PUSH)
        self._epoch = 0

    def begin(self, epoch: int) -> EpochReady:
        """Wait for this epoch's head to announce itself; what still comes of older epochs is not looked at."""
        self._epoch = epoch
        self._outbox.close(0)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.connect(f"ipc://{self.runtime_dir}/engine-{epoch}")
        while True:
            message = self.receive()
            if isinstance(message, EpochReady) and message.epoch == epoch:
                self.ready = message
                return message

    def send(self, message: Message) -> None:
        self._outbox.send(encode(message))

    def submit(self, requests: dict[str, Request]) -> None:
        """Submit new requests, or old ones again."""
        self.requests |= requests
        for request_id, request in requests.items():
            self.send(request.submit(request_id))

    def replay(self) -> None:
        """Submit everything that has not ended."""
        self.submit({request_id: request for request_id, request in self.requests.items() if request.finish is None})

    def receive(self) -> ToFrontend:
        return decode(ToFrontend, self._inbox.recv())

    def pump(self) -> ToFrontend:
        """Take one message; results of this epoch go to their requests."""
        message = self.receive()
        if isinstance(message, Results) and message.epoch == self._epoch:
            for update in message.updates:
                request = self.requests[update.request_id]
                assert request.finish is None, f"{update.request_id} has ended, and gets {update}"
                request.tokens += update.tokens
                request.finish, request.error = update.finish, update.error
        return message

    def pump_until(self, tokens: int) -> None:
        """Until every request has at least so many tokens, or has ended."""
        while any(request.finish is None and len(request.tokens) < tokens for request in self.requests.values()):
            self.pump()

    def finish(self) -> None:
        """Until every request has ended."""
        while any(request.finish is None for request in self.requests.values()):
            self.pump()

    def close(self) -> None:
        self._context.destroy(linger=0)


class Fleet:
    """`world` engines, their epochs, and a frontend. What has died is replaced by a process that was standing by, where one was."""

    def __init__(
        self, runtime_dir: Path, config: RuntimeConfig, world: int, *, module: str = ENGINE, patience: float = WAIT_SECONDS
    ) -> None:
        self.runtime_dir = runtime_dir
        self.world = world
        self.config = config
        self.epoch = 0
        self.frontend = Frontend(runtime_dir, patience)
        self._module = module
        self._patience = patience
        self._standby: dict[int, EngineProcess] = {}
        self.engines = [self._start(rank) for rank in range(world)]

    def load(self) -> None:
        """Have every engine load."""
        for rank, engine in enumerate(self.engines):
            engine.welcome(rank, self.world, self.config)
        for engine in self.engines:
            engine.expect(Loaded)

    def _start(self, rank: int) -> EngineProcess:
        return EngineProcess(
            self.runtime_dir, module=self._module, device_index=rank, local_ranks=self.world, patience=self._patience
        )

    def stand_by(self, ranks: Iterable[int]) -> None:
        """Start processes that wait to take the place of these ranks' engines."""
        for rank in ranks:
            if rank not in self._standby:
                self._standby[rank] = self._start(rank)

    def begin(self) -> None:
        """Form the next epoch; every rank is idle."""
        self.epoch += 1
        head = self.engines[0]
        head.send(OpenEpoch(epoch=self.epoch, world=self.world))
        opened = head.expect(EpochOpened, self.epoch)
        for engine in self.engines:
            engine.send(BeginEpoch(epoch=self.epoch, world=self.world, store=opened.store, links=opened.links))
        for engine in self.engines:
            engine.expect(Ready, self.epoch)
        self.frontend.begin(self.epoch)

    def evidence(self) -> None:
        """Return when some engine has reported something, or has died."""
        if len(self.alive()) < self.world:
            return
        with selectors.DefaultSelector() as selector:
            for engine in self.engines:  # a control socket is readable at the end of its process, too
                selector.register(engine.control.fileno(), selectors.EVENT_READ)
            assert selector.select(self._patience), f"nothing was noticed\n{self.logs()}"

    def end(self) -> dict[int, float]:
        """End the epoch everywhere; the seconds until each living rank had left it."""
        started = time.monotonic()
        for engine in self.alive():
            engine.send(EndEpoch(epoch=self.epoch, reason="the test ends it"))
        seconds = {}
        for engine in self.alive():
            with suppress(EpPeerGone):
                engine.expect(EpochLeft, self.epoch)
                seconds[engine.rank] = time.monotonic() - started
        return seconds

    def alive(self) -> list[EngineProcess]:
        return [engine for engine in self.engines if engine.process.poll() is None]

    def replace_dead(self) -> list[int]:
        """Give every rank whose process is gone another one, and wait until they have loaded; these ranks."""
        dead = [rank for rank, engine in enumerate(self.engines) if engine.process.poll() is not None]
        for rank in dead:
            self.engines[rank].close()
            self.engines[rank] = self._standby.pop(rank, None) or self._start(rank)
            self.engines[rank].welcome(rank, self.world, self.config)
        for rank in dead:
            self.engines[rank].expect(Loaded)
        return dead

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """The tokens of undisturbed requests."""
        requests = {f"calm-{self.epoch}-{number}": Request(prompt, max_tokens) for number, prompt in enumerate(prompts)}
        self.frontend.submit(requests)
        self.frontend.finish()
        return [request.tokens for request in requests.values()]

    def logs(self) -> str:
        return "\n".join(f"--- rank {engine.rank}\n{engine.log()}" for engine in self.engines)

    def close(self) -> None:
        """End every process; those that live are asked first."""
        for engine in self.alive():
            with suppress(EpPeerGone):
                engine.send(Stop(reason="the test is over", grace=0.0))
        for engine in [*self.engines, *self._standby.values()]:
            engine.close()
        self.frontend.close()
