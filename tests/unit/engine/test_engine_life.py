"""Parts of the engine's life: what a standby imports, calls that are made endable, what it is told, and which errors end it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ep_runtime.engine.control import Control, SupervisorGoneError
from ep_runtime.engine.endable import endable
from ep_runtime.engine.main import Engine, device_failed
from ep_runtime.engine.preload import GPU_MODULES, preload
from ep_runtime.engine.run_command import located
from protocol import errors
from protocol.commands import Cmd
from protocol.errors import EpDiverged, EpEpochClosed, EpLinkLost, EpPeerGone, EpRankFailed
from protocol.message_socket import MessageSocket
from protocol.messages import (
    BeginEpoch,
    EndEpoch,
    EpochLeft,
    FromEngineControl,
    OpenEpoch,
    Stop,
    ToEngineControl,
)
from protocol.progress import Phase, ProgressPage
from tests.support.checkpoints import make_checkpoint

STANDBY = """
import sys
from pathlib import Path
from ep_runtime.engine import main
main.preload(Path(sys.argv[2]))
import torch
assert not torch.cuda.is_initialized()
before = set(sys.modules)
from tests.support.rank_context import RankContext
from tests.support.engine import head_of
before |= {name for name in sys.modules if name.startswith("tests.")}
ctx = RankContext(rank=0, world=1, epoch=0, store_port=0, store_fd=None, runtime_dir=Path(), kwargs={})
with head_of(ctx, sys.argv[1], max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64) as driver:
    driver.submit("0", [5, 6, 7], max_tokens=3, temperature=0.7, logprobs=2)
    assert driver.finish()["0"].finish == "length"
print(*sorted(set(sys.modules) - before))
"""


def test_a_standby_has_imported_everything_and_touched_no_device(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", "plain", tmp_path / "model")
    script = [sys.executable, "-c", STANDBY, str(folder), str(tmp_path)]
    root = Path(__file__).resolve().parents[3]
    late = subprocess.run(script, cwd=root, check=True, capture_output=True, text=True).stdout.split()
    assert [name for name in late if name.partition(".")[0] in ("torch", "model", "kernels", "ep_runtime", "protocol")] == []
    assert len(late) <= 3, late


def test_a_host_with_a_gpu_gets_the_gpus_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr("importlib.import_module", imported.append)
    preload(tmp_path)
    assert not set(imported) & set(GPU_MODULES)
    (tmp_path / "nvidia0").touch()
    preload(tmp_path)
    assert set(imported) >= set(GPU_MODULES)


# Calls in C++


def test_a_call_gives_what_it_returns_or_raises() -> None:
    assert endable(lambda: 5, lambda: None, "a call") == 5
    with pytest.raises(ArithmeticError, match="odd"):
        endable(lambda: (_ for _ in ()).throw(ArithmeticError("odd")), lambda: None, "a call")


def test_check_ends_a_call_that_goes_on() -> None:
    go_on = threading.Event()
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise EpEpochClosed("over")

    with pytest.raises(EpEpochClosed):
        endable(go_on.wait, check, "a blocking call")
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "a blocking call"]
    go_on.set()
    thread.join(10)
    assert not thread.is_alive()


# What the supervisor says


@pytest.fixture
def sockets() -> Iterator[tuple[MessageSocket, Control]]:
    ours, theirs = socket.socketpair()
    supervisor = MessageSocket(ours, FromEngineControl)
    engine = MessageSocket(theirs, ToEngineControl)
    yield supervisor, Control(engine)
    supervisor.close()
    engine.close()


def test_what_follows_the_end_of_an_epoch_waits_until_it_is_left(sockets: tuple[MessageSocket, Control]) -> None:
    supervisor, control = sockets
    control.rank = 2
    control.enter(4)
    control.formed()
    assert not control.closed()
    supervisor.send(EndEpoch(epoch=3, reason="late"))
    assert not control.closed()
    assert supervisor.recv(5.0) == EpochLeft(3, 2)
    following = [OpenEpoch(epoch=5, world=1), EndEpoch(epoch=5, reason="again"), Stop(reason="enough", grace=1.0)]
    for message in (EndEpoch(epoch=4, reason="rank 1 died"), *following):
        supervisor.send(message)
    with pytest.raises(EpEpochClosed, match="rank 1 died"):
        control.check()
    assert control.stop is None
    assert supervisor.ready() == []
    control.leave()
    assert supervisor.recv(5.0) == EpochLeft(4, 2)
    assert [control.next() for _ in following] == following
    assert control.stop == following[-1]
    assert supervisor.ready() == []


def test_stop_closes_an_epoch_that_forms_and_not_one_that_runs(sockets: tuple[MessageSocket, Control]) -> None:
    supervisor, control = sockets
    control.enter(1)
    supervisor.send(Stop(reason="enough", grace=5.0))
    assert control.closed()
    with pytest.raises(EpEpochClosed, match="the server stops"):
        control.check()
    control.formed()
    assert not control.closed()
    assert control.stopping()
    assert 0 < control.grace_left() <= 5.0


def test_an_order_out_of_turn_is_no_lost_link(sockets: tuple[MessageSocket, Control]) -> None:
    supervisor, control = sockets
    control.enter(1)
    supervisor.send(BeginEpoch(epoch=2, world=1, store="", links=""))
    with pytest.raises(RuntimeError, match="BeginEpoch in epoch 1"):
        control.closed()


def test_the_end_of_the_supervisor_is_no_lost_link(sockets: tuple[MessageSocket, Control]) -> None:
    supervisor, control = sockets
    control.enter(1)
    supervisor.close()
    for act in (control.closed, control.next, lambda: control.answer(EndEpoch(epoch=1, reason=""))):
        with pytest.raises(SupervisorGoneError):
            act()
    assert not issubclass(SupervisorGoneError, EpLinkLost)


# Which errors end the process


class AcceleratorError(RuntimeError):
    """Bears the name of torch's."""


def chained(outer: Exception, inner: Exception, how: str) -> Exception:
    """`outer` raised while `inner` was handled."""
    try:
        try:
            raise inner
        except Exception as error:
            if how == "from":
                raise outer from error
            if how == "from None":
                raise outer from None
            raise outer  # noqa: B904  (the implicit context is what is tested)
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (EpPeerGone("rank 1 is gone"), False),
        (AcceleratorError("CUDA error: an illegal memory access"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (chained(EpRankFailed("step 3"), AcceleratorError("x"), "from"), True),
        (chained(EpRankFailed("step 3"), AcceleratorError("x"), "while"), True),
        (chained(EpPeerGone("its memory cannot be mapped"), AcceleratorError("x"), "from None"), False),
        (chained(EpRankFailed("step 3"), chained(EpPeerGone("y"), AcceleratorError("x"), "from"), "from"), True),
        (chained(EpRankFailed("step 3"), ValueError("x"), "from"), False),
        (EpRankFailed("step 3: rank 1: DEVICE after 2 collectives: CUDA error"), False),
    ],
)
def test_an_error_of_the_own_device_ends_the_process_however_deep_it_lies(error: Exception, ends: bool) -> None:
    assert device_failed(error) == ends


def test_a_finding_says_where_it_was_made() -> None:
    page = ProgressPage()
    page.begin_epoch(3)
    assert str(located(EpDiverged("x"), 2, page)) == "x [rank 2: step 0, connecting, 0 collectives]"
    page.begin_command(7, Cmd.DECODE)
    page.collective(5)
    page.enter(Phase.EXECUTING)
    found = located(EpRankFailed("y"), 2, page)
    assert (type(found), str(found)) == (EpRankFailed, "y [rank 2: step 7, DECODE executing, 5 collectives]")


def test_every_lost_link_can_be_located() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, EpLinkLost)]
    assert len(kinds) > 5
    for kind in kinds:
        assert type(located(kind("x"), 0, ProgressPage())) is kind


def test_whoever_leaves_closes_its_links_before_it_cuts_collectives_short() -> None:
    """The head may otherwise read what a collective gives that a peer of it has left."""
    done: list[str] = []
    page = ProgressPage()
    engine = Engine(Control.__new__(Control), page, device_index=0, local_ranks=1, runtime_dir=Path())
    with ExitStack() as leaving:
        engine._hold(leaving, Part("epoch", done), Part("links", done))  # type: ignore[arg-type]
    assert done == ["links", "epoch"]
    assert page.read().phase is Phase.LEAVING


class Part:
    """Notes its end."""

    def __init__(self, name: str, done: list[str]) -> None:
        self._name, self._done = name, done

    def close(self) -> None:
        self._done.append(self._name)
