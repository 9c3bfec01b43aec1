"""The engine process at the end of its control socket: any number of epochs, and every way to end one, or the process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import psutil
import pytest

from ep_runtime.engine.comm import open_store
from protocol.ack import Ack, AckStatus
from protocol.errors import EpHandshakeRefused, EpPeerGone
from protocol.handshake import Judgement
from protocol.links import HeadLinks, WorkerLink
from protocol.listener import Listener
from protocol.messages import (
    BeginEpoch,
    EndEpoch,
    EpochEnded,
    EpochLeft,
    EpochOpened,
    Loaded,
    OpenEpoch,
    Ready,
    SamplingParams,
    Stop,
    Submit,
)
from protocol.progress import Phase
from tests.support import chaos_engine
from tests.support.engine_fleet import ENGINE, WAIT_SECONDS, EngineProcess, Fleet, Frontend, Request, settings_of

Checkpoint = Callable[[str, str], Path]
PROMPT = [5, 6, 7]
EVERY_TOKEN = b"\xff" * 64

LEAVE_SECONDS = 3.0
"""A wait ends within 20 ms; the rest is for a machine that is busy with other tests. One that nothing ends takes 5 s and more."""


class Lone:
    """One engine, and a frontend. `epoch` is the last one that a test has begun."""

    def __init__(self, folder: Path, runtime_dir: Path, rank: int, world: int, module: str, settings: dict[str, Any]) -> None:
        self.runtime_dir = runtime_dir
        self.epoch = 0
        self.frontend = Frontend(runtime_dir)
        self.engine = EngineProcess(runtime_dir, module=module)
        self.engine.welcome(rank, world, settings_of(folder, world, **({"max_num_seqs": 2} | settings)))

    def load(self) -> EngineProcess:
        assert set(self.engine.expect(Loaded).seconds) == {"load"}
        return self.engine

    def begin(self) -> int:
        """The next epoch, of a world of one."""
        self.epoch += 1
        self.engine.send(BeginEpoch(epoch=self.epoch, world=1, store="", links=""))
        assert self.engine.expect(Ready) == Ready(self.epoch, 0)
        self.frontend.requests.clear()
        self.frontend.begin(self.epoch)
        return self.epoch

    def form(self, links: str = "", store: str = "127.0.0.1:1") -> int:
        """The next epoch, of a world of two, to which the other rank does not come: the head waits where it has opened it."""
        self.epoch += 1
        engine = self.engine
        if engine.rank == 0:
            engine.send(OpenEpoch(epoch=self.epoch, world=2))
            opened = engine.expect(EpochOpened, self.epoch)
            links, store = opened.links, opened.store
        links = links or f"unix:{self.runtime_dir}/nobody"
        engine.send(BeginEpoch(epoch=self.epoch, world=2, store=store, links=links))
        wait_until(lambda: engine.page.read().epoch == self.epoch, "the epoch does not begin")
        return self.epoch

    def submit(self, count: int, max_tokens: int = 200) -> dict[str, Request]:
        requests = {str(number): Request(PROMPT, max_tokens) for number in range(count)}
        self.frontend.submit(requests)
        return requests

    def finishes(self) -> dict[str, str]:
        """How each request ended, from the results up to the end of the epoch; every one ends once."""
        while not isinstance(self.frontend.pump(), EpochEnded):
            pass
        return {name: request.finish for name, request in self.frontend.requests.items() if request.finish is not None}

    def close(self) -> None:
        self.engine.close()
        self.frontend.close()


def wait_until(done: Callable[[], bool], late: str) -> None:
    deadline = monotonic() + WAIT_SECONDS
    while not done():
        assert monotonic() < deadline, late
        threading.Event().wait(0.005)


class Starter:
    """Starts engines; those that survive their test are shared by the next ones of their rank and world."""

    def __init__(self, checkpoint: Checkpoint, folders: pytest.TempPathFactory) -> None:
        self._checkpoint = checkpoint
        self._folders = folders
        self._started: list[Lone] = []
        self._shared: dict[tuple[int, int], Lone] = {}

    def __call__(self, folder: Path | None = None, *, rank: int = 0, world: int = 1, module: str = ENGINE, **settings: Any) -> Lone:
        chosen = folder if folder is not None else self._checkpoint("mixtral", "plain")
        self._started.append(Lone(chosen, self._folders.mktemp("run"), rank, world, module, settings))
        return self._started[-1]

    def shared(self, *, rank: int = 0, world: int = 1) -> Lone:
        """An engine that has its weights and is in no epoch."""
        if (rank, world) not in self._shared:
            self._shared[rank, world] = self(rank=rank, world=world)
            self._shared[rank, world].load()
        lone = self._shared[rank, world]
        assert lone.engine.page.read().phase is Phase.IDLE, lone.engine.log()
        lone.engine.reports.clear()
        return lone

    def close(self) -> None:
        for lone in self._started:
            lone.close()


@pytest.fixture(scope="module")
def start(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    with closing(Starter(checkpoint, tmp_path_factory)) as starter:
        yield starter


# Stop


def test_stop_while_loading_ends_in_order(start: Starter) -> None:
    lone = start()
    lone.engine.send(Stop(reason="at once", grace=0.0))
    assert lone.engine.exit_status() == 0
    lone.load()


def test_a_standby_ends_at_stop_and_with_its_supervisor(tmp_path: Path) -> None:
    with closing(EngineProcess(tmp_path)) as engine:
        page = engine.page
        wait_until(lambda: page.read().phase is Phase.STANDBY, "it does not stand by")
        engine.send(Stop(reason="nobody needs it", grace=0.0))
        assert engine.exit_status() == 0
    with closing(EngineProcess(tmp_path)) as engine:
        engine.control.close()
        assert engine.exit_status() == 1
        assert "Traceback" not in engine.log()


def test_stop_while_idle_ends_in_order(start: Starter) -> None:
    lone = start()
    lone.load()
    lone.begin()
    lone.engine.send(Stop(reason="idle", grace=20.0))
    assert lone.finishes() == {}
    assert lone.engine.exit_status() == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_stop_while_an_epoch_forms_does_not_wait_for_the_other_rank(start: Starter, rank: int) -> None:
    lone = start(rank=rank, world=2)
    engine = lone.load()
    lone.form()
    engine.send(Stop(reason="at once", grace=0.0))
    assert engine.exit_status() == 0
    assert engine.reports == []


@pytest.mark.parametrize(("grace", "finish"), [(30.0, "length"), (0.0, "abort")])
def test_stop_while_busy_ends_every_request_once(start: Starter, grace: float, finish: str) -> None:
    lone = start()
    lone.load()
    lone.begin()
    requests = lone.submit(5)
    while not (requests["0"].tokens and requests["1"].tokens):
        lone.frontend.pump()
    lone.engine.send(Stop(reason="busy", grace=grace))
    ended = lone.finishes()
    assert set(ended) >= {"0", "1"}
    assert set(ended.values()) == {finish}
    assert lone.engine.exit_status() == 0


# What ends the process


def test_the_end_of_the_control_socket_ends_the_engine(start: Starter) -> None:
    lone = start()
    lone.load()
    lone.begin()
    lone.submit(1)
    lone.engine.control.close()
    assert lone.engine.exit_status() == 1
    assert "Traceback" not in lone.engine.log()


def test_sigterm_ends_the_engine_while_busy(start: Starter) -> None:
    lone = start()
    lone.load()
    lone.begin()
    lone.submit(1)
    lone.engine.process.send_signal(signal.SIGTERM)
    assert lone.engine.exit_status() == -signal.SIGTERM
    with pytest.raises(EpPeerGone):
        lone.engine.control.recv(WAIT_SECONDS)


def test_a_bad_model_is_reported_in_one_line_as_fatal(start: Starter, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("mixtral", "plain"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GhostForCausalLM"]}))
    lone = start(folder)
    report = lone.engine.report()
    assert (report.error, report.fatal, "GhostForCausalLM" in report.message) == ("UnsupportedModel", True, True)
    assert lone.engine.exit_status() == 1
    assert "Traceback" not in lone.engine.log()


def test_what_is_no_lost_link_is_reported_and_ends_the_process(start: Starter) -> None:
    lone = start(rank=1, world=2)
    engine = lone.load()
    engine.send(BeginEpoch(epoch=7, world=2, store="127.0.0.1:1", links="nowhere"))
    report = engine.report()
    assert (report.rank, report.epoch, report.error, report.fatal) == (1, 7, "ValueError", False)
    assert engine.exit_status() == 1


def test_an_error_of_the_device_ends_the_process(start: Starter) -> None:
    lone = start(module="tests.support.faulty_engine")
    engine = lone.load()
    epoch = lone.begin()
    chaos_engine.arm(lone.runtime_dir, "device", 0, {})
    lone.submit(1)
    report = engine.report()
    assert (report.error, report.epoch, report.fatal) == ("DeviceLostError", epoch, False)
    assert "DEVICE" in report.message
    assert "illegal memory access" in report.message
    assert engine.exit_status() == 1


# Leaving epochs


def test_the_next_epoch_may_be_told_in_the_same_breath_as_the_end_of_this_one(start: Starter) -> None:
    lone = start()
    engine = lone.load()
    lone.begin()
    for message in (EndEpoch(epoch=1, reason="a test"), OpenEpoch(epoch=2, world=1), Stop(reason="enough", grace=0.0)):
        engine.send(message)
    engine.expect(EpochLeft, 1)
    engine.expect(EpochOpened, 2)
    assert engine.exit_status() == 0


def test_an_idle_engine_answers_the_end_of_any_epoch_once(start: Starter) -> None:
    lone = start.shared()
    engine = lone.engine
    for epoch in (lone.epoch, lone.epoch + 5, lone.epoch + 5):
        engine.leaves(epoch)
    epoch = lone.begin()
    engine.leaves(epoch + 1)  # another epoch's end does not end this one
    lone.submit(1, max_tokens=5)
    lone.frontend.finish()
    engine.leaves(epoch)


def test_an_epoch_that_was_opened_and_not_begun_leaves_nothing_open(start: Starter) -> None:
    lone = start.shared(world=2)
    engine = lone.engine
    for _ in range(3):
        before = resources(engine.pid)
        lone.epoch += 1
        engine.send(OpenEpoch(epoch=lone.epoch, world=2))
        opened = engine.expect(EpochOpened, lone.epoch)
        assert Path(opened.links.removeprefix("unix:")).exists()
        assert engine.leaves(lone.epoch) < LEAVE_SECONDS
        assert not Path(opened.links.removeprefix("unix:")).exists()
        host, port = opened.store.split(":")
        with socket.socket() as sock:
            assert sock.connect_ex((host, int(port))) != 0
    wait_until(lambda: no_more(resources(engine.pid), before), "a thread or a descriptor of the last epoch goes on")


@pytest.mark.parametrize("what", ["decoding", "waiting for a mask", "nothing"])
def test_a_running_epoch_is_left_at_once(start: Starter, what: str) -> None:
    lone = start.shared()
    for _ in range(2):
        epoch = lone.begin()
        if what == "waiting for a mask":
            sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=9, grammar=True)
            lone.frontend.requests["masked"] = request = Request(PROMPT, 9)
            lone.frontend.send(Submit("masked", "masked", PROMPT, sampling, mask=EVERY_TOKEN))
            while not request.tokens:
                lone.frontend.pump()
        elif what == "decoding":
            lone.submit(2)
            lone.frontend.pump_until(3)
        assert lone.engine.leaves(epoch) < LEAVE_SECONDS


@pytest.mark.parametrize("rank", [0, 1])
def test_an_epoch_whose_other_rank_does_not_come_is_left_at_once(start: Starter, rank: int) -> None:
    lone = start.shared(rank=rank, world=2)
    for _ in range(2):
        assert lone.engine.leaves(lone.form()) < LEAVE_SECONDS
    assert lone.engine.reports == []


@pytest.mark.parametrize("where", ["hello", "offers", "handshake", "meeting", "group", "store"])
def test_a_worker_leaves_wherever_the_head_falls_silent(start: Starter, where: str) -> None:
    """The head is this test, up to some point; then it says no more. It is not gone: nothing but EndEpoch ends the wait."""
    lone = start.shared(rank=1, world=2)
    engine = lone.engine
    before = resources(engine.pid)
    with ExitStack() as head:
        listener = head.enter_context(Listener(f"unix:{lone.runtime_dir}/links"))
        silent = head.enter_context(socket.create_server(("127.0.0.1", 0)))
        store, address = open_store("127.0.0.1", 2)
        stores = [store]
        head.callback(stores.clear)
        del store
        if where == "store":
            address = f"127.0.0.1:{silent.getsockname()[1]}"
        epoch = lone.form(links=listener.address, store=address)
        if where != "hello":
            be_head(head.enter_context(closing(meet_worker(listener, epoch))), where)
        if where == "store":
            head.enter_context(silent.accept()[0])
        if where == "group":
            wait_until(lambda: stores[0].check([f"epoch-{epoch}/0/1"]), "the worker does not show its address")
        assert engine.leaves(epoch) < LEAVE_SECONDS
    if where != "store":  # torch goes on for seconds, in a thread, to look for a store that is gone
        wait_until(lambda: no_more(resources(engine.pid), before), "a thread or a descriptor of the epoch goes on")


def meet_worker(listener: Listener, epoch: int) -> HeadLinks:
    """The head's end of the link to the one worker."""
    return listener.accept(
        world=2, epoch=epoch, token="", deadline=monotonic() + WAIT_SECONDS, closed=lambda: False, on_refused=pytest.fail
    )


def be_head(links: HeadLinks, where: str) -> None:
    """What the head says before a worker comes to `where`."""
    deadline = monotonic() + WAIT_SECONDS
    if where == "offers":
        return
    links.exchange(msgspec.msgpack.encode(10), deadline)
    links.collect_blobs(deadline)
    if where == "handshake":
        return
    links.send_blob(msgspec.msgpack.encode(Judgement(refused=None)), deadline)
    if where != "meeting":
        links.exchange(b"", deadline)


@pytest.mark.parametrize("offer", [b"", b"\xc1", b"\xff", msgspec.msgpack.encode(-5), msgspec.msgpack.encode("many"), None])
def test_a_head_that_talks_nonsense_ends_the_epoch_and_not_the_process(start: Starter, offer: bytes | None) -> None:
    lone = start.shared(rank=1, world=2)
    with Listener(f"unix:{lone.runtime_dir}/links") as listener:
        epoch = lone.form(links=listener.address)
        deadline = monotonic() + WAIT_SECONDS
        with closing(meet_worker(listener, epoch)) as links:
            (own,) = links.collect_blobs(deadline)
            links.send_blob(b"\xc1" if offer is None else msgspec.msgpack.encode([offer, own]), deadline)
            report = lone.engine.report()
    assert (report.error, report.epoch) == ("EpFrameCorrupt", epoch)
    lone.engine.leaves(epoch)


def test_a_worker_of_another_epoch_is_refused_and_the_right_one_is_not(start: Starter) -> None:
    lone = start.shared(world=2)
    lone.epoch += 1
    lone.engine.send(OpenEpoch(epoch=lone.epoch, world=2))
    opened = lone.engine.expect(EpochOpened, lone.epoch)
    lone.engine.send(BeginEpoch(epoch=lone.epoch, world=2, store=opened.store, links=opened.links))
    end = monotonic() + WAIT_SECONDS
    place: dict[str, Any] = {"rank": 1, "token": "", "deadline": end, "closed": lambda: False}
    with pytest.raises(EpHandshakeRefused, match="EPOCH"):
        WorkerLink.connect(opened.links, epoch=lone.epoch - 1, **place)
    with closing(WorkerLink.connect(opened.links, epoch=lone.epoch, **place)) as link:
        link.send_blob(msgspec.msgpack.encode(7), end)
        assert msgspec.msgpack.decode(link.receive_blob(end), type=list[bytes])[1] == msgspec.msgpack.encode(7)
        link.ack(Ack(1, lone.epoch - 1, 0, AckStatus.OK))  # no handshake message
        assert lone.engine.report().error == "EpFrameCorrupt"
    lone.engine.leaves(lone.epoch)


# Many epochs


def resources(pid: int) -> tuple[int, int, int]:
    """Resident bytes, descriptors and threads of a process."""
    process = psutil.Process(pid)
    return process.memory_info().rss, len(os.listdir(f"/proc/{pid}/fd")), process.num_threads()


def no_more(now: tuple[int, int, int], before: tuple[int, int, int]) -> bool:
    """Whether there are not more descriptors or threads. Some of those before may have been about to end."""
    return now[1] <= before[1] and now[2] <= before[2]


def test_twenty_epochs_leave_nothing_behind(checkpoint: Checkpoint, tmp_path: Path) -> None:
    world, settled, epochs = 2, 5, 20
    with closing(Fleet(tmp_path, settings_of(checkpoint("qwen3_next", "plain"), world, num_blocks=600), world)) as fleet:
        fleet.load()
        seen: list[list[tuple[int, int, int]]] = []
        for _ in range(settled + epochs):
            fleet.begin()
            busy = {f"{fleet.epoch}-{number}": Request(PROMPT, 200) for number in range(3)}
            fleet.frontend.submit(busy)
            fleet.frontend.pump_until(2)
            fleet.end()
            fleet.frontend.requests.clear()
            seen.append([resources(engine.pid) for engine in fleet.engines])
        for rank in range(world):
            before, after, pid = seen[settled - 1][rank], seen[-1][rank], fleet.engines[rank].pid
            grown = f"descriptors and threads: {before[1:]}, then {after[1:]}"
            wait_until(lambda pid=pid, before=before: no_more(resources(pid), before), grown)  # a thread may be about to end
            assert after[0] - before[0] < 8 << 20, "resident bytes"


def test_the_page_follows_the_engine(start: Starter) -> None:
    lone = start.shared()
    page = lone.engine.page
    epoch = lone.begin()
    assert page.read().epoch == epoch
    lone.submit(1, max_tokens=3)
    lone.frontend.finish()
    wait_until(lambda: page.read().phase is Phase.WAITING, "it does not rest")
    step = page.read().step
    wait_until(lambda: page.read().command_name == "PING" and page.read().step > step, "no PING while idle")
    lone.engine.leaves(epoch)
    assert page.read().phase is Phase.IDLE
