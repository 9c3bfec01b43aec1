"""A worker daemon over TCP, with a fake engine, and the test as its head: what it says, keeps, starts again and leaves behind."""

from __future__ import annotations

import signal
import socket
import time

import pytest

from protocol.messages import (
    EndEpoch,
    EpochLeft,
    KillEngine,
    Loaded,
    Progress,
    Ready,
    Refused,
    Report,
    Stop,
)
from tests.support.python_path import python_path
from tests.support.supervised import FAKES, WAIT_SECONDS, assert_gone
from tests.support.supervised_daemon import BEGIN, TOKEN

# Joining and leaving


def test_a_daemon_names_itself_takes_everything_from_the_head_and_leaves_on_stop(start):
    head = start()
    join = head.accept()
    assert (join.token, join.rank, join.host) == (TOKEN, None, socket.gethostname())
    head.welcome()
    assert set(head.receive(Loaded).seconds) == {"spawn", "import", "load"}
    engine = head.engine()
    head.send(Stop(reason="over", grace=3.0))
    assert head.end() == 0
    assert_gone([engine])
    assert list(head.runtime.iterdir()) == []
    assert TOKEN not in head.output.output


def test_a_refusal_for_good_ends_the_daemon_with_its_reason(start):
    head = start()
    head.accept()
    head.send(Refused(reason="the token is wrong"))
    assert head.end() == 1
    assert "ep-runtime failed: refused by the head: the token is wrong" in head.output.output


def test_a_refusal_for_now_is_tried_again(start):
    head = start()
    first = head.accept()
    head.send(Refused(reason="all 2 ranks have joined", again=True))
    second = head.accept()
    assert second == first
    head.welcome()
    head.receive(Loaded)


def test_a_head_that_is_not_there_yet_is_waited_for(start):
    head = start()
    head.listener.close()
    head.output.until("INFO .*no head yet")
    head.listen_again()
    head.load()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_without_a_head_ends_the_daemon_at_once(start, number):
    head = start()
    head.accept()
    head.daemon.send_signal(number)
    assert head.end() == 0
    assert list(head.runtime.iterdir()) == []


def test_a_signal_with_a_head_asks_the_head(start):
    head = start()
    head.load()
    head.daemon.send_signal(signal.SIGTERM)
    assert head.receive(Stop).reason == "SIGTERM"
    head.send(Stop(reason="SIGTERM", grace=0.0))
    assert head.end() == 0


# Engines that end


@pytest.mark.parametrize(
    ("act", "error", "outside"),
    [("dies", "EngineKilled", True), ("crashes", "EngineKilled", False), ("exits", "EngineExited", False)],
)
def test_an_engine_that_ends_is_reported_and_replaced(start, act, error, outside):
    head = start(FAKE_ENGINE_1=f"running {act}@1", FAKE_ALONE="request-7")
    head.load(standby=False)
    head.send(BEGIN)
    head.receive(Ready)
    report = head.receive(Report)
    assert (report.error, report.ended, report.outside, report.alone) == (error, True, outside, "request-7")
    assert (report.rank, report.epoch, report.fatal) == (1, 3, False)
    assert head.receive(Loaded).rank == 1
    head.begin()


def test_what_an_engine_reports_comes_before_the_word_of_its_end(start):
    head = start(FAKE_ENGINE_1="forming fails@1")
    head.load()
    head.send(BEGIN)
    spoken = head.receive(Report)
    assert (spoken.error, spoken.message, spoken.ended) == ("RuntimeError", "the device is on fire", False)
    assert head.receive(Report).ended
    head.receive(Loaded)


def test_a_report_alone_replaces_nothing(start):
    head = start(FAKE_ENGINE_1="running reports@1", FAKE_ALONE="request-7")
    head.load()
    engine = head.engine()
    head.begin()
    report = head.receive(Report)
    assert (report.ended, report.alone) == (False, "request-7")
    head.send(EndEpoch(epoch=3, reason="that"))
    assert head.receive(EpochLeft) == EpochLeft(epoch=3, rank=1, alone="request-7")
    head.begin()
    assert engine.is_running()


def test_a_stopped_engine_is_killed_on_request_and_replaced(start):
    head = start()
    head.load(standby=False)
    head.begin()
    engine = head.engine()
    engine.send_signal(signal.SIGSTOP)
    head.send(EndEpoch(epoch=3, reason="late"))
    head.send(KillEngine(reason="it did not leave epoch 3"))
    report = head.receive(Report)
    assert (report.ended, report.outside, report.error) == (True, False, "EpDeadline")
    assert report.message == "its engine was killed: it did not leave epoch 3"
    head.receive(Loaded)
    assert_gone([engine])


def test_orders_for_an_engine_that_is_gone_do_not_reach_the_next_one(start):
    head = start(FAKE_ENGINE_1="running dies@1")
    head.load(standby=False)
    head.begin()
    head.send(EndEpoch(epoch=3, reason="crossed with the report"))
    assert head.receive(Report).ended
    head.receive(Loaded)
    head.begin()
    head.send(EndEpoch(epoch=3, reason="this one counts"))
    head.receive(EpochLeft)
    assert head.output.read_rest().count("leaves epoch") == 1


def test_the_order_to_kill_an_engine_that_died_meanwhile_spares_the_next_one(start):
    head = start(FAKE_ENGINE_1="running dies@1,load hangs@2")
    head.load(standby=False)
    head.begin()
    assert head.receive(Report).ended
    head.output.until("hangs in load")
    head.send(KillEngine(reason="meant for the first"))
    head.send(Stop(reason="over", grace=0.0))
    assert head.end() == 0
    assert "meant for the first" not in head.output.read_rest()


def test_starts_that_fail_in_a_row_come_ever_later_and_a_ready_makes_the_next_one_come_at_once(start):
    head = start(FAKE_ENGINE_1="load dies@1,load exits@2,load fails@3")
    head.accept()
    head.welcome(standby=False)
    assert [head.receive(Report).error for _ in range(4)] == ["EngineKilled", "EngineExited", "RuntimeError", "EngineExited"]
    head.receive(Loaded)
    head.begin()
    for pause in ("0.5", "1", "2"):
        head.output.until(f"another starts in {pause} s\n")
    assert "another starts\n" not in head.output.output
    head.send(KillEngine(reason="the test wants it"))
    head.output.until("another starts\n")


def test_an_engine_killed_after_ready_is_replaced_by_the_standby_that_lived_already(start):
    head = start()
    head.load()
    head.begin()
    first = head.engine()
    standby = head.standby()
    head.output.mark()
    first.kill()
    assert head.receive(Report).outside
    seconds = head.receive(Loaded).seconds
    assert head.engine().pid == standby.pid
    assert seconds["spawn"] == 0.0
    head.begin()
    head.output.until(r"fake process \d+ waits")  # and after the next Ready there is another


def test_engine_and_standby_die_with_a_killed_daemon(start):
    head = start()
    head.load()
    head.begin()
    standby = head.standby()
    engine = head.engine()
    head.daemon.kill()
    assert_gone([engine, standby])


# Progress


def test_progress_is_told_while_an_epoch_forms_or_runs(start):
    head = start()
    head.load()
    head.begin()
    head.link.recv(timeout=WAIT_SECONDS)
    progress = head.link.recv(timeout=WAIT_SECONDS)
    assert isinstance(progress, Progress)
    assert (progress.rank, progress.epoch, progress.step, progress.phase, progress.collectives) == (1, 3, 7, "WAITING", 0)
    assert progress.idle_s > 0
    head.send(EndEpoch(epoch=3, reason="enough"))
    head.receive(EpochLeft)
    head.send(KillEngine(reason="to hear what comes next"))
    assert isinstance(head.link.recv(timeout=WAIT_SECONDS), Report)


# The head goes away and comes back


def test_a_daemon_that_loses_the_head_leaves_the_epoch_and_keeps_its_engine_for_the_next(start):
    head = start()
    head.load()
    head.begin()
    engine = head.engine()
    head.drop()
    head.output.until("fake engine 1 leaves epoch 3")
    assert head.accept().rank == 1
    head.welcome(port=8001)  # what may differ between processes does not count
    assert head.receive(Loaded) == Loaded(rank=1)
    head.begin()
    assert engine.is_running()
    assert head.output.read_rest().count("fake engine 1 pid") == 1


def test_another_configuration_replaces_the_engine(start):
    head = start()
    head.load()
    head.begin()
    engine = head.engine()
    head.drop()
    head.accept()
    head.output.mark()
    head.welcome(block_size=32)
    assert head.receive(Loaded).seconds["load"] >= 0
    assert head.engine().pid != engine.pid
    assert_gone([engine])


def test_another_configuration_replaces_an_engine_that_still_leaves_and_lets_the_next_one_live(start):
    head = start(FAKE_ENGINE_1="leaving hangs@1")
    head.load()
    head.begin()
    engine = head.engine()
    head.drop()
    head.accept()
    head.welcome(block_size=32)
    head.receive(Loaded)
    assert_gone([engine])
    head.begin()


def test_an_engine_that_does_not_leave_after_the_head_is_lost_is_replaced(start):
    head = start(FAKE_ENGINE_1="leaving hangs@1")
    head.load()
    head.begin()
    engine = head.engine()
    head.drop()
    head.accept()
    head.welcome()
    assert head.receive(Report).message == "its engine was killed: it did not leave its epoch within 2 s of losing the head"
    head.receive(Loaded)
    assert_gone([engine])


def test_an_engine_that_dies_without_a_head_is_started_again_and_waits_loaded(start):
    head = start()
    head.load(standby=False)
    head.listener.close()
    head.drop()
    head.output.until("lost the head")
    head.output.until("WARNING .*no head yet .cannot connect")
    engine = head.engine()
    head.output.mark()
    engine.kill()
    head.engine()
    head.listen_again()
    head.load(standby=False)
    head.begin()


def test_the_rank_it_had_is_wished_for_once(start):
    head = start()
    head.load()
    head.drop()
    assert head.accept().rank == 1
    head.send(Refused(reason="rank 1 is outside the ranks 1 to 0 that may join"))
    assert head.accept().rank is None


def test_a_signal_while_the_head_is_lost_ends_the_daemon_and_its_engine(start):
    head = start()
    head.load()
    engine = head.engine()
    head.listener.close()
    head.drop()
    head.output.until("lost the head")
    head.daemon.send_signal(signal.SIGTERM)
    assert head.end() == 0
    assert_gone([engine])
    assert list(head.runtime.iterdir()) == []


# STOP in every state


@pytest.mark.parametrize("moment", ["load", "forming", "leaving"])
def test_stop_ends_an_engine_that_does_not_listen(start, moment):
    head = start(FAKE_ENGINE_1=f"{moment} hangs")
    head.accept()
    head.welcome()
    if moment != "load":
        head.receive(Loaded)
        head.send(BEGIN)
        head.send(EndEpoch(epoch=3, reason="over"))
    head.output.until(f"hangs in {moment}")
    engine = head.engine()
    head.send(Stop(reason="over", grace=0.0))
    assert head.end() == 0
    assert_gone([engine])


def test_stop_kills_an_engine_that_ignores_sigterm(start):
    head = start(FAKE_ENGINE_1="stopping is deaf")
    head.load()
    head.begin()
    standby = head.standby()
    engine = head.engine()
    head.send(Stop(reason="over", grace=0.2))
    assert head.end() == 0
    assert_gone([engine, standby])
    assert "SIGKILL to its engine" in head.output.output


def test_stop_during_a_pause_between_starts_ends_at_once(start):
    head = start(FAKE_ENGINE_1="load dies")
    head.accept()
    head.welcome()
    for _ in range(3):
        head.receive(Report)
    head.output.until("another starts in 2 s")
    head.send(Stop(reason="over", grace=3.0))
    assert head.end() == 0


# The model


HUB = """
import os, time
def snapshot_download(name, **_):
    os.write(1, f"fetching {name} in {os.getpid()}\\n".encode())
    time.sleep(600)
"""


def test_a_model_that_is_being_fetched_does_not_keep_the_daemon_from_stopping(start, tmp_path):
    hub = tmp_path / "huggingface_hub"
    hub.mkdir()
    (hub / "__init__.py").write_text(HUB)
    (hub / "errors.py").touch()
    head = start(PYTHONPATH=python_path(tmp_path, FAKES))
    head.accept()
    head.welcome(model="org/name")
    fetch = head.output.process(r"fetching org/name in (\d+)")
    began = time.monotonic()
    head.send(Stop(reason="over", grace=3.0))
    assert head.end() == 0
    assert time.monotonic() - began < 30
    assert_gone([fetch])


def test_a_model_that_is_not_on_this_host_is_reported_and_ends_the_daemon_with_status_1(start):
    head = start()
    head.accept()
    head.welcome(model="/no/such/model")
    report = head.receive(Report)
    assert (report.error, report.fatal, report.ended) == ("ModelNotFound", True, False)
    head.send(Stop(reason="that", grace=0.0))
    assert head.end() == 1
    assert "ep-runtime failed: model: there is no folder /no/such/model" in head.output.output
