"""The standby: real ones that are killed while they wait, below a daemon of which the test is the head, and in servers; pauses."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from ep_runtime.supervise.engine_process import EngineProcess, Post
from ep_runtime.supervise.loop import Loop, Timer
from ep_runtime.supervise.process import Exit
from ep_runtime.supervise.standby import Standby
from protocol.messages import EndEpoch, EpochLeft, FromEngineControl, Loaded, Report, Stop, Welcome
from tests.support.python_path import python_path
from tests.support.supervised import FAKES, WAIT_SECONDS, assert_gone
from tests.support.supervised_daemon import Head

WAITS = r"fake process (\d+) waits"
NO_OTHER = "no other before the next epoch runs"


def serving(start: Callable[..., Head], settings: dict[str, object] | None = None, **variables: str) -> Head:
    """A daemon whose engine runs an epoch."""
    head = start(**variables)
    head.load(**(settings or {}))
    head.begin()
    return head


def killed(head: Head, standby: psutil.Process, follows: str) -> None:
    """Kill it, and wait for the one line that says so."""
    head.output.mark()
    standby.kill()
    head.output.until(rf"WARNING \[worker\] rank 1: its standby, process {standby.pid}, ended: killed by SIGKILL; {follows}\n")
    assert head.output.output.count(f"process {standby.pid}, ended") == 1


# Real ones


def test_one_that_is_killed_while_the_engine_serves_is_replaced_before_it_is_needed(start):
    head = serving(start)
    engine, first = head.engine(), head.standby()
    killed(head, first, "another starts in 0.5 s")
    second = head.output.process(WAITS)
    head.output.until(f"INFO .worker. rank 1: its standby is process {second.pid}\n")
    assert engine.is_running()
    head.output.mark()
    engine.kill()
    assert head.receive(Report).outside
    assert head.receive(Loaded).seconds["spawn"] == 0.0
    assert head.engine().pid == second.pid
    head.begin()


def test_those_that_end_at_once_come_ever_later_and_after_the_limit_one_with_each_epoch(start):
    head = serving(start, {"max_failed_starts": 3})
    standby = head.standby()
    for pause in ("0.5", "1"):
        killed(head, standby, f"another starts in {pause} s")
        standby = head.output.process(WAITS)
    killed(head, standby, f"3 in a row have not stood for 60 s: {NO_OTHER}")
    head.send(EndEpoch(epoch=3, reason="the test wants the next one"))
    head.receive(EpochLeft)
    head.begin()
    standby = head.output.process(WAITS)
    killed(head, standby, f"4 in a row have not stood for 60 s: {NO_OTHER}")
    assert head.output.read_rest().count(" waits") == 5


def test_one_that_is_killed_while_the_engine_is_in_no_epoch_is_replaced_when_the_next_one_runs(start):
    head = serving(start)
    standby = head.standby()
    head.send(EndEpoch(epoch=3, reason="the test wants it idle"))
    head.receive(EpochLeft)
    killed(head, standby, NO_OTHER)
    head.begin()
    head.output.until(WAITS)


def test_one_that_is_killed_together_with_the_engine_is_told_and_does_not_count_as_a_start(start):
    head = serving(start)
    engine, standby = head.engine(), head.standby()
    daemon = psutil.Process(head.daemon.pid)
    daemon.suspend()  # so that it learns of both ends at once
    for process in (engine, standby):
        ended = os.pidfd_open(process.pid)
        process.kill()
        assert select.select([ended], [], [], WAIT_SECONDS)[0]
        os.close(ended)
    daemon.resume()
    assert head.receive(Report).ended
    head.receive(Loaded)
    assert "another starts\n" in head.output.read_rest()
    head.output.until(f"rank 1: its standby, process {standby.pid}, ended: killed by SIGKILL; {NO_OTHER}")
    head.output.mark()
    head.begin()
    head.output.until(WAITS)


def test_none_is_started_while_the_daemon_stops_though_one_was_due(start):
    head = serving(start, FAKE_ENGINE_1="stopping is deaf")  # so that the end takes longer than the pause
    engine = head.engine()
    killed(head, head.standby(), "another starts in 0.5 s")
    head.send(Stop(reason="over", grace=0.2))
    assert head.end() == 0
    assert_gone([engine])
    assert "SIGKILL to its engine" in head.output.output
    assert re.findall(WAITS, head.output.output[head.output.at :]) == []


def test_none_is_started_once_the_daemon_was_asked_to_end(start):
    head = serving(start)
    standby = head.standby()
    head.daemon.send_signal(signal.SIGTERM)
    assert head.receive(Stop).reason == "SIGTERM"
    killed(head, standby, NO_OTHER)
    head.send(Stop(reason="SIGTERM", grace=0.0))
    assert head.end() == 0


def test_a_process_has_waited_since_its_imports_until_its_end_or_its_welcome(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", python_path(FAKES))
    monkeypatch.setenv("FAKE_STARTS", str(tmp_path))
    post = Post(
        rank=1, host="h", device_index=0, local_world=1, runtime_dir=tmp_path, token=None, boot="b", engine_module="fake_engine"
    )
    waited: dict[str, float] = {}
    with Loop() as loop:

        def loaded(engine: EngineProcess, _: FromEngineControl) -> None:
            waited["loaded"] = engine.waited()
            engine.send_signal(signal.SIGKILL, "it was asked enough")

        def ended(engine: EngineProcess, _: Exit) -> None:
            waited["killed" if engine is first else "ended"] = engine.waited()
            if len(waited) == 4:
                loop.stop()

        def look() -> None:
            if first.waited() < 0.2 or not second.waited():
                loop.later(0.02, look)
                return
            first.send_signal(signal.SIGKILL, "it has waited for long enough")
            second.welcome(Welcome(rank=1, world=2, config=b""), time.monotonic())

        first, second = (EngineProcess(loop, post, 1, loaded, ended) for _ in range(2))
        waited["new"] = first.waited()
        look()
        loop.run()
    assert waited["killed"] >= 0.2
    assert (waited["new"], waited["loaded"], waited["ended"]) == (0, 0, 0)


# Real ones of whole servers


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_standby_is_replaced_and_the_recovery_waits_for_no_start(serve, rank):
    server = serve(2)
    server.running()
    engine = server.engine(rank)
    first = server.processes.process(rf"rank {rank}: its standby is process (\d+)")
    server.mark()
    first.kill()
    server.until(rf"WARNING .rank {rank}. rank {rank}: its standby, process {first.pid}, ended: killed by SIGKILL; another starts")
    second = server.processes.process(rf"rank {rank}: its standby is process (\d+)")
    server.until(rf"fake process {second.pid} waits")
    assert "epoch 1 ended" not in server.output
    server.mark()
    engine.kill()
    assert float(server.until(r"epoch 2 runs on 2 ranks; recovered in .*spawn ([\d.]+)")[1]) == 0
    assert server.engine(rank).pid == second.pid
    assert server.stop() == [0, 0]
    server.assert_over(engine, second)


def test_no_standby_is_started_while_the_server_drains(serve):
    server = serve(1)
    server.running()
    standby = server.standby(server.engine(0))
    frontend = server.frontend()
    frontend.suspend()  # so that draining goes on
    server.ranks[0].send_signal(signal.SIGTERM)
    server.until("stopping .SIGTERM.")
    standby.kill()
    server.until(f"its standby, process {standby.pid}, ended: killed by SIGKILL; no other before the next epoch runs\n")
    frontend.resume()
    assert server.statuses() == [0]
    server.assert_over(frontend)


# Pauses and limits, without time


class Process:
    """One that stands by; `seconds`: for how long it has waited."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.alive = True
        self.seconds = 0.0

    def waited(self) -> float:
        return self.seconds


class Bench:
    """A standby whose processes and timers are the test's."""

    def __init__(self, limit: int = 5) -> None:
        self.allowed = True
        self.refused = False
        self.started = 0
        self.timers: list[tuple[float, Timer]] = []
        self.standby = Standby(self, self._start, lambda: self.allowed)
        self.standby.employ(1, limit)

    def later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        self.timers.append((seconds, Timer(callback)))
        return self.timers[-1][1]

    def _start(self) -> Process:
        if self.refused:
            raise BlockingIOError("Resource temporarily unavailable")
        self.started += 1
        return Process(self.started)

    def end(self, seconds: float = 0.0) -> None:
        self.standby.process.seconds = seconds
        self.standby.ended(Exit(signal=signal.SIGKILL))

    def due(self) -> float:
        """Let the one timer fire; its seconds."""
        ((seconds, timer),) = self.timers
        self.timers.clear()
        if timer.callback is not None:
            timer.callback()
        return seconds


def test_the_pauses_are_those_of_the_engine_up_to_the_limit():
    bench = Bench(limit=9)
    bench.standby.want()
    pauses = []
    for _ in range(8):
        bench.end(seconds=59.9)
        assert bench.standby.process is None
        pauses.append(bench.due())
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30]
    bench.end()
    assert (bench.timers, bench.started) == ([], 9)
    bench.standby.want()
    assert bench.started == 10


@pytest.mark.parametrize("limit", [1, 5])
def test_one_that_has_stood_is_replaced_at_once_and_those_before_it_do_not_count(limit):
    bench = Bench(limit)
    bench.standby.want()
    for _ in range(limit - 1):
        bench.end()
        bench.due()
    for _ in range(3):
        bench.end(seconds=60.0)
        assert bench.standby.process.pid == bench.started
    assert bench.timers == []


def test_one_that_has_stood_and_became_the_engine_clears_the_count_and_one_that_has_not_does_not():
    for seconds, pause in ((60.0, 0.5), (59.9, 1)):
        bench = Bench()
        bench.standby.want()
        bench.end()
        bench.due()
        bench.standby.process.seconds = seconds
        assert bench.standby.take().pid == 2
        bench.standby.want()
        bench.end()
        assert bench.due() == pause


def test_one_that_has_ended_unnoticed_is_not_taken():
    bench = Bench()
    assert bench.standby.take() is None
    bench.standby.want()
    bench.standby.process.alive = False
    assert bench.standby.take() is None
    bench.end()
    assert bench.due() == 0.5


def test_what_becomes_due_when_none_may_be_started_waits_until_one_may():
    bench = Bench()
    bench.standby.want()
    bench.end()
    bench.allowed = False
    bench.due()
    bench.standby.want()
    assert bench.started == 1
    bench.allowed = True
    bench.standby.want()
    bench.standby.want()
    assert bench.started == 2


def test_an_epoch_that_comes_before_the_pause_is_over_does_not_cut_it_short():
    bench = Bench()
    bench.standby.want()
    bench.end()
    bench.standby.want()
    assert bench.started == 1
    bench.due()
    assert bench.started == 2


def test_a_process_that_the_system_does_not_give_is_tried_for_again_within_the_same_limit(caplog):
    bench = Bench(limit=2)
    bench.refused = True
    bench.standby.want()
    assert bench.due() == 0.5
    assert bench.timers == []
    assert caplog.messages == [
        "rank 1: its standby could not be started: Resource temporarily unavailable; another starts in 0.5 s",
        "rank 1: its standby could not be started: Resource temporarily unavailable; "
        "2 in a row have not stood for 60 s: no other before the next epoch runs",
    ]


def test_after_discard_none_is_due_and_nothing_counts():
    bench = Bench()
    bench.standby.want()
    bench.end()
    assert bench.standby.discard() is None
    bench.due()
    assert bench.started == 1
    bench.standby.want()
    assert bench.standby.discard().pid == 2
    bench.standby.want()
    bench.end()
    assert bench.due() == 0.5
