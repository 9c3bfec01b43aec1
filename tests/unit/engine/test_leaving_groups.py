"""The order of things when a group over NCCL and peer memory are left, with stand-ins for the GPU; tests/gpu has the real ones."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from ep_runtime.engine import nccl, peers
from ep_runtime.engine.comm import GroupCommunicator
from ep_runtime.engine.nccl import ENVIRONMENT, DeviceStuckError, NcclGroup
from protocol.errors import EpEpochClosed, EpLinkLost, EpPeerGone

DEVICE = torch.device("cuda", 0)


class FakeGpu:
    """What happens, in order. `busy`: the device waits for a peer until it is aborted. `blocked`: so does the host, in a call."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.busy = threading.Event()
        self.blocked = threading.Event()
        self.abort_hangs = False
        self.ignores_abort = False

    def group(self, store: Any, rank: int, world: int, options: Any) -> Any:
        assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
        self.events.append("made")
        return SimpleNamespace(_allgather_base=self.gather, abort=self.abort)

    def gather(self, out: Any, mine: Any) -> Any:
        while self.blocked.is_set():
            threading.Event().wait(0.001)
        self.events.append("connected")
        return SimpleNamespace(wait=lambda: None)

    def abort(self) -> None:
        self.events.append("aborted")
        if not self.ignores_abort:
            self.busy.clear()
            self.blocked.clear()
        while self.abort_hangs:
            threading.Event().wait(0.001)

    def event(self) -> Any:
        return SimpleNamespace(record=lambda stream: None, query=lambda: not self.busy.is_set())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    fake = SimpleNamespace(Options=SimpleNamespace)
    monkeypatch.setattr(
        nccl, "_torch", SimpleNamespace(ProcessGroupNCCL=type("Nccl", (), {"Options": fake.Options, "__new__": _new(gpu)}))
    )
    stream = SimpleNamespace(synchronize=lambda: None)
    for name, value in {"set_device": lambda device: None, "current_stream": lambda device: stream, "Event": gpu.event}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(nccl.torch, "zeros", lambda *size, device: None)
    monkeypatch.setattr(nccl.torch, "empty", lambda *size, device: None)
    monkeypatch.setattr(nccl, "LEAVE_SECONDS", 30.0)
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "not ours")
    return gpu


@pytest.fixture
def hurried(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not leave is found to be stuck soon."""
    monkeypatch.setattr(nccl, "LEAVE_SECONDS", 0.1)


def _new(gpu: FakeGpu) -> Any:
    return lambda kind, store, rank, world, options: gpu.group(store, rank, world, options)


def join(check: Any = lambda: None) -> NcclGroup:
    return NcclGroup(lambda: "store", rank=0, world=2, device=DEVICE, timeout_s=5.0, check=check)


def test_a_group_is_connected_when_it_is_made_and_aborted_when_it_is_left(gpu: FakeGpu) -> None:
    group = join()
    assert gpu.events == ["made", "connected"]
    gpu.busy.set()
    group.leave()
    assert gpu.events == ["made", "connected", "aborted"]
    assert group.group is None
    group.leave()
    assert gpu.events.count("aborted") == 1


@pytest.mark.usefixtures("hurried")
def test_a_device_that_is_not_done_is_said_to_be_stuck(gpu: FakeGpu) -> None:
    group = join()
    gpu.busy.set()
    gpu.ignores_abort = True
    with pytest.raises(DeviceStuckError, match="cuda:0 is not done"):
        group.leave()
    assert not issubclass(DeviceStuckError, EpLinkLost)


@pytest.mark.usefixtures("hurried")
def test_an_abort_that_hangs_is_said_to(gpu: FakeGpu) -> None:
    group = join()
    gpu.abort_hangs = True
    with pytest.raises(DeviceStuckError, match="goes on"):
        group.leave()
    gpu.abort_hangs = False


def closed() -> None:
    raise EpEpochClosed("over")


def test_joining_that_waits_for_a_dead_peer_is_aborted(gpu: FakeGpu) -> None:
    gpu.blocked.set()
    with pytest.raises(EpEpochClosed):
        join(closed)
    assert "aborted" in gpu.events


@pytest.mark.usefixtures("hurried")
def test_joining_that_no_abort_ends_leaves_a_process_of_no_use(gpu: FakeGpu) -> None:
    gpu.blocked.set()
    gpu.ignores_abort = True
    with pytest.raises(DeviceStuckError):
        join(closed)
    gpu.blocked.clear()


class FakePeers:
    """Peer memory that tells what is done with it."""

    memory = None

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def connect(self, exchange: Any) -> None:
        self._gpu.events.append("shown")

    def abort(self) -> None:
        self._gpu.events.append("word set")

    def disconnect(self) -> None:
        assert not self._gpu.busy.is_set(), "the device still writes there"
        self._gpu.events.append("unmapped")


def test_memory_is_unmapped_when_the_device_is_done(gpu: FakeGpu) -> None:
    comm = GroupCommunicator(join(), 0, 2, DEVICE, lambda: None)
    comm.join_peers(lambda own: [own, own], [FakePeers(gpu)])  # type: ignore[list-item]
    gpu.busy.set()
    comm.close()
    assert gpu.events == ["made", "connected", "shown", "word set", "aborted", "unmapped"]
    assert comm.peers is None
    comm.close()
    assert gpu.events[-1] == "unmapped"
    assert gpu.events.count("unmapped") == 1


# Peer memory over epochs


class Opened:
    """A peer's memory, mapped here."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> peers.Peers:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(peers, "_handle", lambda tensor: [b"handle", tensor.nbytes])
    monkeypatch.setattr(peers, "BUFFER_BYTES", {"sums": 4096})
    return peers.Peers(1, 2, torch.device("cpu"), torch.float32, "sums")


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_the_memory_for_sums_has_room_for_every_peer(world: int) -> None:
    """Whatever their number: as many rows as of one peer, and words of every rank twice, within what the plan counts."""
    memory = peers.Peers(world - 1, world, torch.device("meta"), torch.bfloat16, "sums").memory
    room, words = peers.shared_bytes("sums", world)
    assert memory.fits(12_288, 2048)
    assert 2 * memory.capacity * 2 <= room <= 8 * memory.words_at
    assert memory.words_at * 8 + 2 * world * memory.slot * 8 <= room + words
    most = {2: 256, 3: 128, 5: 64, 8: 36}[world]
    assert memory.in_words(most, 2048, torch.bfloat16)
    assert not memory.in_words(most + 1, 2048, torch.bfloat16)
    assert memory.two_shots == (world > 2)


def test_a_new_epoch_rewrites_the_tables_in_place(memory: peers.Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[list[object]] = []

    def open_memory(device: int, *handle: object) -> Opened:
        opened.append(list(handle))
        return Opened(1000 * len(opened))

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_memory, raising=False)
    held = memory.memory
    places = [tensor.data_ptr() for tensor in (held.buffers, held.signals, held.turns, held.abort)]
    own = (memory._buffer.data_ptr(), memory._signals.data_ptr())
    for epoch in range(2):
        calls: list[bytes] = []

        def exchange(mine: bytes, calls: list[bytes] = calls, epoch: int = epoch) -> list[bytes]:
            assert not held.abort.any()
            if calls:  # every rank's device is done with the epoch before, and none has begun
                assert not held.turns.any()
                assert not memory._signals.any()
                assert not memory._buffer[4096:].any()
            calls.append(mine)
            return [msgspec.msgpack.encode([[b"%d" % epoch, 1], [b"s%d" % epoch, 2]]), mine]

        memory.connect(exchange)
        assert len(calls) == 2, "no meeting before the first sum"
        assert held.buffers.tolist() == [2000 * epoch + 1000, own[0]]
        assert held.signals.tolist() == [2000 * epoch + 2000, own[1]]
        assert len(memory._opened) == 2
        memory.abort()
        assert held.abort.tolist() == [1]
        held.turns.fill_(9)
        memory._signals.fill_(9)
        memory._buffer.fill_(9)
    assert [handle[0] for handle in opened] == [b"0", b"s0", b"1", b"s1"]
    assert places == [tensor.data_ptr() for tensor in (held.buffers, held.signals, held.turns, held.abort)]


def test_memory_of_a_peer_that_has_just_died_is_a_lost_link(memory: peers.Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(device: int, *handle: object) -> Opened:
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", gone, raising=False)
    with pytest.raises(EpPeerGone, match="memory of rank 0"):
        memory.connect(lambda mine: [msgspec.msgpack.encode([[b"a", 1], [b"b", 2]]), mine])
