"""The engine process at the end of its control socket: every way to end it, at every moment, and what it says before it goes."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from ep_runtime.config import Facts, RuntimeConfig, resolve
from protocol.codec import decode, encode
from protocol.errors import EpPeerGone
from protocol.message_socket import MessageSocket
from protocol.messages import (
    BeginEpoch,
    EndEpoch,
    EpochEnded,
    EpochReady,
    FromEngineControl,
    Loaded,
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

WAIT_SECONDS = 60.0
Checkpoint = Callable[[str, str], Path]


class EngineProcess:
    """A lone engine, this test as its supervisor, and a socket in the place of the frontend."""

    def __init__(self, folder: Path, runtime_dir: Path, *, rank: int = 0, world: int = 1) -> None:
        self.runtime_dir = runtime_dir
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.inbox.setsockopt(zmq.RCVTIMEO, int(1000 * WAIT_SECONDS))
        self.inbox.bind(f"ipc://{runtime_dir}/frontend")
        self.outbox = self.context.socket(zmq.PUSH)
        ours, theirs = socket.socketpair()
        self.log_path = runtime_dir / "log"
        command = ["-P", "-m", "ep_runtime.engine.main", "--control-fd", str(theirs.fileno()), "--runtime-dir", str(runtime_dir)]
        with theirs, self.log_path.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, *command], pass_fds=[theirs.fileno()], stdout=log, stderr=log)
        self.control = MessageSocket(ours, FromEngineControl, peer="the engine")
        config = RuntimeConfig(model=str(folder), device="cpu", max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64)
        config = resolve(config, Facts(gpus=0, cores=1, world=world, local_world=world))
        config = config.model_copy(update={"threads": 1})
        self.control.send(Welcome(rank=rank, world=world, config=config.to_json()), WAIT_SECONDS)

    def begin(self, epoch: int) -> EpochReady:
        """Take the engine from LOADED into an epoch of a world of one."""
        assert self.control.recv(WAIT_SECONDS) == Loaded(0)
        self.control.send(BeginEpoch(epoch=epoch, world=1, store="", links=""), WAIT_SECONDS)
        assert self.control.recv(WAIT_SECONDS) == Ready(epoch, 0)
        self.outbox.connect(f"ipc://{self.runtime_dir}/engine-{epoch}")
        ready = self.receive()
        assert isinstance(ready, EpochReady)
        return ready

    def receive(self) -> ToFrontend:
        return decode(ToFrontend, self.inbox.recv())

    def submit(self, request_id: str, max_tokens: int) -> None:
        sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.outbox.send(encode(Submit(request_id=request_id, group=request_id, prompt=[5, 6, 7], sampling=sampling)))

    def finishes(self) -> dict[str, str]:
        """How each request ended, from the results up to the end of the epoch; every one ends once."""
        found: dict[str, str] = {}
        while not isinstance(message := self.receive(), EpochEnded):
            assert isinstance(message, Results)
            for update in message.updates:
                if update.finish is not None:
                    assert update.request_id not in found
                    found[update.request_id] = update.finish
        return found

    def exit_status(self) -> int:
        return self.process.wait(WAIT_SECONDS)

    def log(self) -> str:
        return self.log_path.read_text()

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()
        self.context.destroy(linger=0)


@pytest.fixture
def start(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EngineProcess]]:
    engines: list[EngineProcess] = []

    def begin(folder: Path | None = None, **place: int) -> EngineProcess:
        chosen = folder if folder is not None else checkpoint("mixtral", "plain")
        engines.append(EngineProcess(chosen, tmp_path_factory.mktemp("run"), **place))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def test_stop_while_loading_ends_in_order(start: Callable[..., EngineProcess]) -> None:
    engine = start()
    engine.control.send(Stop(reason="at once", grace=0.0), WAIT_SECONDS)
    assert engine.exit_status() == 0
    assert [engine.control.recv(WAIT_SECONDS)] == [Loaded(0)]


def test_stop_while_idle_ends_in_order(start: Callable[..., EngineProcess]) -> None:
    engine = start()
    engine.begin(1)
    engine.control.send(Stop(reason="idle", grace=20.0), WAIT_SECONDS)
    assert engine.finishes() == {}
    assert engine.exit_status() == 0


@pytest.mark.parametrize(("grace", "finish"), [(30.0, "length"), (0.0, "abort")])
def test_stop_while_busy_ends_every_request_once(start: Callable[..., EngineProcess], grace: float, finish: str) -> None:
    engine = start()
    engine.begin(1)
    for number in range(5):
        engine.submit(str(number), 200)
    assert isinstance(engine.receive(), Results)
    engine.control.send(Stop(reason="busy", grace=grace), WAIT_SECONDS)
    ended = engine.finishes()
    assert set(ended) >= {"0", "1"}
    assert set(ended.values()) == {finish}
    assert engine.exit_status() == 0


def test_the_end_of_the_control_socket_ends_the_engine(start: Callable[..., EngineProcess]) -> None:
    engine = start()
    engine.begin(1)
    engine.submit("0", 200)
    engine.control.close()
    assert engine.exit_status() == 1
    assert "Traceback" not in engine.log()


def test_sigterm_ends_the_engine_while_busy(start: Callable[..., EngineProcess]) -> None:
    engine = start()
    engine.begin(1)
    engine.submit("0", 200)
    engine.process.send_signal(signal.SIGTERM)
    assert engine.exit_status() == -signal.SIGTERM
    with pytest.raises(EpPeerGone):
        engine.control.recv(WAIT_SECONDS)


def test_a_report_names_its_rank_and_epoch(start: Callable[..., EngineProcess]) -> None:
    engine = start(rank=1, world=2)
    assert engine.control.recv(WAIT_SECONDS) == Loaded(1)
    engine.control.send(
        BeginEpoch(epoch=7, world=2, store="127.0.0.1:1", links=f"unix:{engine.runtime_dir}/x" + "y" * 200), WAIT_SECONDS
    )
    report = engine.control.recv(WAIT_SECONDS)
    assert isinstance(report, Report)
    assert (report.rank, report.epoch) == (1, 7)
    assert engine.exit_status() == 1


def test_a_bad_model_is_reported_in_one_line(start: Callable[..., EngineProcess], checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("mixtral", "plain"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GhostForCausalLM"]}))
    engine = start(folder)
    report = engine.control.recv(WAIT_SECONDS)
    assert isinstance(report, Report)
    assert (report.error, "GhostForCausalLM" in report.message) == ("UnsupportedModel", True)
    assert engine.exit_status() == 1
    assert "Traceback" not in engine.log()


def test_the_next_epoch_may_be_told_in_the_same_breath_as_the_end_of_this_one(start: Callable[..., EngineProcess]) -> None:
    engine = start()
    engine.begin(1)
    for message in (EndEpoch(epoch=1, reason="a test"), OpenEpoch(epoch=2, world=1), Stop(reason="enough", grace=0.0)):
        engine.control.send(message, WAIT_SECONDS)
    assert engine.control.recv(WAIT_SECONDS).epoch == 2
    assert engine.exit_status() == 0
