"""The supervisor's small parts: pauses, the clock of a start, who ended an engine, calls from threads, left-over files, flags."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from pathlib import Path

import pytest

from ep_runtime import worker
from ep_runtime.config import RuntimeConfig
from ep_runtime.supervise import engine_keeper, supervisor
from ep_runtime.supervise.backoff import connect_pause, start_pause
from ep_runtime.supervise.engine_keeper import EngineKeeper, Job
from ep_runtime.supervise.engine_process import Post, judge_end
from ep_runtime.supervise.folder import RuntimeFolder, clear_epochs
from ep_runtime.supervise.head_link import HeadLink, notice_dead_peer
from ep_runtime.supervise.lookup import Lookup
from ep_runtime.supervise.loop import Loop
from ep_runtime.supervise.process import Exit
from ep_runtime.supervise.source import at_hand
from ep_runtime.supervise.start_clock import StartClock
from protocol.message_socket import MessageSocket
from protocol.messages import Join, Report, Stop, ToCoordinator, Welcome
from protocol.progress import Phase, Position
from tests.support.python_path import python_path


def test_starts_that_fail_are_repeated_ever_later_but_not_too_late():
    assert [start_pause(failures) for failures in range(10)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert start_pause(10**6) == 30


def test_the_head_is_tried_ever_later_but_not_too_late():
    assert [connect_pause(tries) for tries in range(1, 9)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5])
    assert connect_pause(10**6) == 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_of_somebody_else_comes_from_outside(number):
    error, message, outside = judge_end(Exit(signal=number), frozenset(), "")
    assert (error, message, outside) == ("EngineKilled", f"its engine ended: killed by {number.name}", True)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_a_crash_does_not_come_from_outside(number):
    assert judge_end(Exit(signal=number), frozenset(), "")[2] is False


def test_what_the_supervisor_did_itself_does_not_come_from_outside():
    sent = frozenset({signal.SIGKILL})
    assert judge_end(Exit(signal=signal.SIGKILL), sent, "too late") == ("EpDeadline", "its engine was killed: too late", False)
    assert judge_end(Exit(signal=signal.SIGTERM), sent, "too late")[2] is True
    assert judge_end(Exit(status=0), sent, "too late") == ("EngineExited", "its engine ended: exit status 0", False)


def at(phase: Phase, moves: int, idle_s: float) -> Position:
    return Position(moves=moves, epoch=0, step=0, command=0, phase=phase, collectives=0, idle_s=idle_s, alone="")


def test_a_cold_start_is_told_apart_into_its_phases():
    clock = StartClock()
    clock.want(100.0)
    clock.look(100.0, at(Phase.STARTING, 0, 0.0))
    clock.look(100.5, at(Phase.STARTING, 1, 0.3))  # its first move was at 100.2
    assert clock.learns
    clock.look(103.0, at(Phase.LOADING, 2, 1.0))  # it took its Welcome at 102.0
    assert not clock.learns
    assert clock.seconds(107.0) == pytest.approx({"spawn": 0.2, "import": 1.8, "load": 5.0})


def test_a_standby_counts_only_what_is_still_to_wait_for():
    clock = StartClock()
    clock.look(50.0, at(Phase.STARTING, 1, 0.0))
    assert not clock.learns
    clock.want(100.0)
    clock.look(100.0, at(Phase.STANDBY, 2, 47.0))
    assert clock.learns
    clock.look(100.5, at(Phase.LOADING, 3, 0.25))
    assert clock.seconds(103.0) == pytest.approx({"spawn": 0.0, "import": 0.25, "load": 2.75})


def test_a_load_that_was_over_between_two_looks_begins_at_the_first_of_them():
    clock = StartClock()
    clock.want(10.0)
    clock.look(10.0, at(Phase.STARTING, 1, 0.0))
    clock.look(11.0, at(Phase.STARTING, 1, 1.0))
    clock.look(11.1, at(Phase.IDLE, 5, 0.01))
    assert clock.seconds(11.1) == pytest.approx({"spawn": 0.0, "import": 1.0, "load": 0.1})


def test_calls_from_a_thread_run_on_the_loops_thread_in_their_order():
    seen: list[tuple[int, int]] = []
    with Loop() as loop:

        def work() -> None:
            for number in range(1000):
                loop.call_from_thread(lambda number=number: seen.append((number, threading.get_ident())))
            loop.call_from_thread(loop.stop)

        thread = threading.Thread(target=work)
        thread.start()
        loop.run()
        thread.join()
    assert seen == [(number, threading.get_ident()) for number in range(1000)]
    loop.call_from_thread(loop.stop)  # a closed loop: nothing happens


def test_what_ended_epochs_left_is_removed_and_nothing_else(tmp_path):
    for name in ("links-1", "engine-1", "engine-12", "frontend", "join", "lock", "links-x"):
        (tmp_path / name).touch()
    clear_epochs(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["frontend", "join", "links-x", "lock"]


def left_by_a_killed_server(folder: Path, age: float) -> Path:
    folder.mkdir(mode=0o700)
    (folder / "frontend.json").touch()
    (folder / "lock").touch()
    os.utime(folder / "lock", (0, (folder / "lock").stat().st_mtime - age))
    return folder


def test_folders_of_killed_servers_are_swept_and_those_of_living_ones_are_not(tmp_path):
    killed = left_by_a_killed_server(tmp_path / "ep_runtime-killed", age=3600)
    beginning = left_by_a_killed_server(tmp_path / "ep_runtime-beginning", age=0)
    other = tmp_path / "ep_runtime-other"
    other.mkdir(mode=0o700)
    with RuntimeFolder(tmp_path / "ep_runtime-living") as living:
        os.utime(living.path / "lock", (0, 0))
        with RuntimeFolder(tmp_path / "ep_runtime-next"):
            assert living.path.exists()
            assert not killed.exists()
            assert beginning.exists()
            assert other.exists()


def test_what_is_at_hand_needs_no_process(tmp_path):
    assert at_hand(str(tmp_path))
    assert at_hand("/no/such/folder")
    assert not at_hand("org/name")
    assert not at_hand("demo")


def test_a_search_that_ends_without_an_answer_says_how(monkeypatch, tmp_path):
    (tmp_path / "huggingface_hub").mkdir()
    (tmp_path / "huggingface_hub" / "__init__.py").write_text("import os; os._exit(9)")
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    answers: list[str] = []
    with Loop() as loop:

        def missing(why: str) -> None:
            answers.append(why)
            loop.stop()

        Lookup(loop, "org/name", lambda folder: None, missing).start()
        loop.run()
    assert answers == ["model: the search for it ended: exit status 9"]


def test_an_engine_for_which_there_is_no_process_is_a_failed_start(monkeypatch, tmp_path):
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(engine_keeper, "EngineProcess", refused)
    post = Post(
        rank=1, host="h", device_index=0, local_world=1, runtime_dir=tmp_path, token=None, boot="b", engine_module="fake_engine"
    )
    deaths: list[str] = []
    with Loop() as loop:
        keeper = EngineKeeper(loop, post, lambda message: None, lambda death: deaths.append(death.message))
        keeper.employ(Job(Welcome(rank=1, world=2, config=b""), 1, False, 5, (1,)))
        assert deaths == ["its engine could not be started: Resource temporarily unavailable"]
        gone: list[bool] = []
        keeper.stop(Stop(reason="", grace=1.0), lambda: gone.append(True))
        assert gone == [True]


def test_a_head_that_hangs_does_not_hold_up_an_end_that_it_was_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "ASKED_SECONDS", 0.1)
    post = Post(rank=1, host="h", device_index=0, local_world=1, runtime_dir=tmp_path, token=None, boot="b", engine_module="none")
    ours, theirs = socket.socketpair()
    ended: list[tuple[int, str]] = []
    with Loop() as loop, ours:

        def finish(status: int, cause: str) -> None:
            ended.append((status, cause))
            loop.stop()

        subject = supervisor.Supervisor(loop, theirs, post, finish)
        subject.start()
        head = MessageSocket(ours, ToCoordinator)
        head.send(Welcome(rank=1, world=2, config=RuntimeConfig(model="/no/such/model").to_json()))
        loop.later(0.2, lambda: subject.ask_stop("SIGTERM"))
        loop.run()
        assert [type(head.recv()) for _ in range(3)] == [Join, Report, Stop]
    assert ended == [(1, "model: there is no folder /no/such/model, and it is not of the form ORG/NAME")]


def test_a_head_that_does_not_answer_is_waited_for_no_longer_than_allowed(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener, Loop() as loop:
        causes: list[str] = []

        def give_up(cause: str) -> None:
            causes.append(cause)
            loop.stop()

        join = Join(token="", host="h", boot="b", rank=1, device="cpu", package="p")
        link = HeadLink(
            loop,
            join,
            sock=None,
            connect=lambda: socket.create_connection(listener.getsockname()),
            patience=0.2,
            on_message=lambda message: None,
            on_lost=lambda error: None,
            on_given_up=give_up,
        )
        link.start()
        loop.run()
    (cause,) = causes
    assert re.fullmatch(r"no head for \d+ s: no answer to JOIN", cause)


def test_a_silent_host_is_noticed_by_the_kernel():
    with socket.socket() as sock:
        notice_dead_peer(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15000


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--head"),
        (["--head", "host"], "HOST:PORT"),
        (["--head", "host:0"], "port from 1 to 65535"),
        (["--head", "host:1", "--device-index", "-1"], "number from 0"),
        (["--head", "host:1", "--model", "m"], "--model"),
    ],
)
def test_flags_that_a_daemon_does_not_take_are_refused_by_name(monkeypatch, capsys, arguments, named):
    monkeypatch.setattr("sys.argv", ["worker", *arguments])
    with pytest.raises(SystemExit) as refused:
        worker.main()
    assert refused.value.code == 2
    assert named in capsys.readouterr().err


def test_a_token_file_that_cannot_be_read_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["worker", "--head", "127.0.0.1:1", "--token-file", str(tmp_path / "none")])
    assert worker.main() == 2
    assert "token_file" in capsys.readouterr().err
