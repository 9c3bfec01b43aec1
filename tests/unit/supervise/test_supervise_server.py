"""Whole servers of real processes with fake engines: what is recovered, who ends when and how, and what is left behind."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from tests.support.ports import free_port
from tests.support.supervised import WAIT_SECONDS, assert_gone
from tests.support.supervised_server import Server

TOKEN = "0123456789abcdef"


# An ordered end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_every_rank_ends_everything_with_status_0(serve, number):
    server = serve(2)
    server.running()
    engines = [server.engine(0), server.engine(1)]
    children = [*engines, server.frontend(), server.standby(*engines)]
    for process in server.ranks:  # torchrun passes its signal on to all of them
        process.send_signal(number)
    assert server.statuses() == [0, 0]
    server.assert_over(*children)
    assert "device 1" in server.output
    assert " WARNING " not in server.output
    assert "resolved configuration" in server.output


def test_a_signal_to_one_worker_ends_the_server_in_order(serve):
    server = serve(2, "--no-standby")
    server.running()
    server.ranks[1].send_signal(signal.SIGTERM)
    assert server.statuses() == [0, 0]
    assert "stopping (rank 1: SIGTERM)" in server.output


def test_a_world_of_one_needs_no_launcher_and_recovers(serve):
    server = serve(1)
    server.running()
    server.engine(0).kill()
    server.until("epoch 2 runs on 1 rank")
    assert server.stop() == [0]


@pytest.mark.parametrize(
    ("orders", "seen"),
    [
        ({"FAKE_ENGINE_1": "load hangs"}, "hangs in load"),
        ({"FAKE_ENGINE_0": "opening hangs"}, "hangs in opening"),
        ({"FAKE_ENGINE_1": "forming hangs"}, "hangs in forming"),
        ({"FAKE_ENGINE_1": "running dies@1,load hangs@2"}, "hangs in load"),
        ({"FAKE_ENGINE_1": "running dies@1,forming hangs@2"}, "hangs in forming"),
        ({"FAKE_ENGINE_0": "running dies@1", "FAKE_ENGINE_1": "leaving hangs"}, "hangs in leaving"),
        ({"FAKE_ENGINE_1": "running dies@1,load dies"}, "another starts in 1 s"),
    ],
)
def test_sigterm_ends_everything_with_status_0_whatever_is_going_on(serve, orders, seen):
    server = serve(2, "--no-standby", "--drain-timeout=0", **orders)
    server.until(seen)
    children = [child for process in server.ranks for child in psutil.Process(process.pid).children(recursive=True)]
    assert server.stop() == [0, 0]
    server.assert_over(*children)


def test_an_engine_that_ignores_everything_is_killed_in_time(serve):
    server = serve(2, "--no-standby", FAKE_ENGINE_1="stopping is deaf")
    server.running()
    deaf = server.engine(1)
    began = time.monotonic()
    assert server.stop() == [0, 0]
    assert time.monotonic() - began < 25  # torchrun kills after 30
    server.assert_over(deaf)
    assert "SIGKILL to its engine" in server.output


# Engines that end


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_killed_engines_are_replaced_and_the_others_stay(serve, ranks):
    server = serve(2)
    server.running()
    engines = [server.engine(0), server.engine(1)]
    server.mark()
    for rank in ranks:
        engines[rank].kill()
    epoch = server.running()
    assert epoch > 1
    for rank, engine in enumerate(engines):
        assert engine.is_running() == (rank not in ranks)
        assert (f"fake engine {rank} pid" in server.output[server.processes.at :]) == (rank in ranks)
    cause = re.search(r"epoch 1 ended: rank (\d): its engine ended: killed by SIGKILL", server.output)
    assert cause is not None
    assert int(cause[1]) in ranks
    (folder,) = server.runtime.iterdir()
    left = {f"links-{epoch}", f"engine-{epoch}"}
    assert {entry.name for entry in folder.iterdir() if entry.name.startswith(("links-", "engine-"))} == left
    assert server.stop() == [0, 0]
    server.assert_over(*engines)


def test_the_standby_that_lived_already_becomes_the_engine(serve):
    server = serve(1)
    server.running()
    engine = server.engine(0)
    standby = server.standby(engine)
    server.mark()
    engine.kill()
    assert server.engine(0).pid == standby.pid
    server.until("epoch 2 runs on")
    server.standby(standby)


@pytest.mark.parametrize(
    "orders",
    [
        {"FAKE_ENGINE_1": "running exits@1"},
        {"FAKE_ENGINE_1": "running crashes@1"},
        {"FAKE_ENGINE_1": "running reports@1"},
        {"FAKE_ENGINE_0": "opening dies@1"},
        {"FAKE_ENGINE_1": "forming dies@1"},
        {"FAKE_ENGINE_1": "forming fails@1"},
        {"FAKE_ENGINE_0": "running dies@1", "FAKE_ENGINE_1": "leaving hangs@1"},
        {"FAKE_ENGINE_0": "running dies@1", "FAKE_ENGINE_1": "leaving dies@1"},
        {"FAKE_ENGINE_0": "running dies@1,forming dies@2", "FAKE_ENGINE_1": "running dies@1,load dies@2"},
    ],
    ids=lambda orders: "; ".join(orders.values()),
)
def test_an_epoch_follows_whatever_an_engine_does(serve, orders):
    server = serve(2, "--no-standby", **orders)
    server.until(r"epoch [2-9] runs on 2 ranks; recovered in|epoch [2-9] runs on 2 ranks$")
    assert server.stop() == [0, 0]
    server.assert_over()


def test_an_engine_that_dies_while_it_loads_is_started_again(serve):
    server = serve(2, "--no-standby", FAKE_ENGINE_1="load dies@1,load exits@2")
    assert server.running() == 1
    assert server.stop() == [0, 0]


def test_a_stopped_engine_is_killed_when_an_epoch_ends(serve):
    server = serve(2, "--no-standby")
    server.running()
    stopped = server.engine(1)
    stopped.suspend()
    server.engine(0).kill()
    server.until(r"the engine is killed: it has not left epoch 1")
    server.until("epoch 2 runs on 2 ranks")
    assert_gone([stopped])
    assert server.stop() == [0, 0]


def test_an_engine_that_dies_at_every_start_ends_the_server_with_its_cause(serve):
    server = serve(2, "--no-standby", "--max-failed-starts=3", FAKE_ENGINE_1="load dies")
    engine = server.engine(0)
    assert server.statuses()[0] == 1
    cause = "rank 1: 3 starts in a row have failed; the last: rank 1: its engine ended: killed by SIGKILL"
    assert f"ep-runtime failed: {cause}" in server.output
    server.assert_over(engine)


def test_an_engine_that_dies_while_the_frontend_drains_delays_nothing(serve):
    server = serve(2, "--no-standby", FAKE_ENGINE_1="leaving hangs")
    server.running()
    server.engine(0).kill()
    server.until("hangs in leaving")
    began = time.monotonic()
    assert server.stop() == [0, 0]
    assert time.monotonic() - began < 25
    server.assert_over()


def test_a_load_that_takes_too_long_names_its_rank(serve):
    server = serve(2, "--no-standby", "--load-timeout=10", FAKE_ENGINE_1="load hangs")
    assert server.statuses()[0] == 1
    assert "ep-runtime failed: load: nothing from rank 1 after 10 s" in server.output
    server.assert_over()


# Supervisors that end


def test_children_die_with_a_killed_supervisor_whose_rank_may_be_started_again(serve):
    server = serve(2)
    server.running()
    engines = [server.engine(0), server.engine(1)]
    server.mark()
    server.ranks[1].kill()
    server.until("epoch 1 ended: rank 1: its supervisor is gone")
    assert_gone([engines[1]])
    server.ranks[1].wait()
    server.ranks[1] = server.start_rank(1)
    server.until("epoch 2 runs on 2 ranks")
    assert engines[0].is_running()
    assert server.stop() == [0, 0]
    server.assert_over(*engines)


def test_children_die_with_the_heads_killed_supervisor_and_the_other_rank_ends_when_it_is_told_to(serve):
    server = serve(2)
    server.running()
    engines = [server.engine(0), server.engine(1)]
    children = [engines[0], server.frontend()]
    server.ranks[0].kill()
    server.until("rank 1: lost the head")
    assert_gone(children)
    assert engines[1].is_running()
    server.ranks[1].send_signal(signal.SIGTERM)  # by torchrun, which sees that rank 0 has failed
    assert server.statuses() == [-signal.SIGKILL, 0]
    assert_gone(engines)


def test_a_rank_of_torchrun_does_not_wait_for_ever(serve):
    server = serve(0, "--rendezvous-timeout=1")
    server.world = 2
    alone = server.start_rank(1)
    assert alone.wait(WAIT_SECONDS) == 1
    assert "ep-runtime failed: no head for" in server.output


# The frontend


def answer_of(port: int) -> int:
    """The process id of the frontend that answers on `port`, which may be about to be started."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS) as client:
        return int(client.recv(100))


def test_a_killed_frontend_is_started_again_on_the_same_port_and_the_engines_stay(serve):
    port = free_port()
    server = serve(2, "--no-standby", f"--port={port}")
    server.running()
    engines = [server.engine(0), server.engine(1)]
    frontend = server.frontend()
    assert answer_of(port) == frontend.pid
    server.mark()
    frontend.kill()
    assert_gone([frontend])  # until then it could take the connection
    second = answer_of(port)
    assert server.frontend().pid == second != frontend.pid
    assert all(engine.is_running() for engine in engines)
    assert "runs on" not in server.output[server.processes.at :]
    assert server.stop() == [0, 0]


def test_a_frontend_that_cannot_start_ends_the_server_with_its_cause(serve):
    server = serve(1, "--no-standby", "--max-failed-starts=2", FAKE_FRONTEND="dies")
    assert server.statuses() == [1]
    assert "ep-runtime failed: the frontend: 2 starts in a row have failed; the last: exit status 7" in server.output
    server.assert_over()


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--tool-call-parser=psychic", "tool_call_parser: there is none by the name 'psychic'; known: auto, hermes, "),
        ("--reasoning-parser=psychic", "reasoning_parser: there is none by the name 'psychic'; known: auto, none, "),
        ("--chat-template=/nowhere/at/all", "chat_template: there is no file /nowhere/at/all"),
        (f"--chat-template={300 * 'a'}", "chat_template: there is no file aaa"),
        ("--image-dir=/nowhere/at/all", "image_dir is no folder: /nowhere/at/all"),
        (f"--image-dir={300 * 'a'}", "image_dir is no folder: aaa"),
    ],
)
def test_what_is_not_there_is_found_by_serve_itself(serve, flag, reason):
    server = serve(1, flag)
    assert server.statuses() == [2]
    assert server.output.startswith(f"ep-runtime: {reason}")
    assert server.output.count("\n") == 1
    assert "resolved configuration" not in server.output
    server.assert_over()


# Daemons


class Relay:
    """Carries one connection at a time from its own port to another, until it is cut."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._port = port
        self._pair: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                near.close()
                continue
            self._pair = [near, far]
            for ends in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=copy, args=ends, daemon=True))
                self._threads[-1].start()

    def cut(self) -> None:
        self._pair[0].shutdown(socket.SHUT_RDWR)  # the threads do the rest

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


def copy(source: socket.socket, target: socket.socket) -> None:
    """Until either end is closed; then so is the other direction."""
    with source:
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


def head_of_two(serve: Callable[..., Server], *flags: str) -> tuple[Server, int]:
    """Rank 0 of a world of two that others join over TCP, and the port where they do."""
    port = free_port()
    world = ("--world-size=2", "--coordinator-host=127.0.0.1", f"--coordinator-port={port}")
    return serve(1, *world, *flags, EP_RUNTIME_TOKEN=TOKEN), port


def test_a_daemon_joins_by_token_takes_the_heads_configuration_and_leaves_with_it(serve):
    server, port = head_of_two(serve)
    wrong = server.start_daemon(f"127.0.0.1:{port}", EP_RUNTIME_TOKEN=TOKEN[::-1])
    assert wrong.wait(WAIT_SECONDS) == 1
    server.until("ep-runtime failed: refused by the head: the token is wrong")
    daemon = server.start_daemon(f"127.0.0.1:{port}")
    server.until("epoch 1 runs on 2 ranks")
    engines = [server.engine(0), server.engine(1)]
    assert server.stop() == [0]
    assert daemon.wait(WAIT_SECONDS) == 0
    server.assert_over(*engines)
    assert TOKEN not in server.output


def test_a_daemon_survives_the_heads_restart_with_its_weights(serve):
    server, port = head_of_two(serve, "--no-standby")
    daemon = server.start_daemon(f"127.0.0.1:{port}")
    server.until("epoch 1 runs on 2 ranks")
    engine = server.engine(1)
    server.mark()
    server.ranks[0].kill()
    server.ranks[0].wait()
    server.until("fake engine 1 leaves epoch 1")
    server.ranks[0] = server.start_rank(0)
    server.until("epoch 1 runs on 2 ranks")
    assert engine.is_running()
    assert "fake engine 1 pid" not in server.output[server.processes.at :]
    assert server.stop() == [0]
    assert daemon.wait(WAIT_SECONDS) == 0
    assert_gone([engine])


def test_a_daemon_survives_a_broken_connection_with_its_weights(serve):
    server, port = head_of_two(serve, "--no-standby")
    relay = Relay(port)
    daemon = server.start_daemon(relay.address)
    server.until("epoch 1 runs on 2 ranks")
    engine = server.engine(1)
    server.mark()
    relay.cut()
    server.until("epoch 2 runs on 2 ranks")
    assert engine.is_running()
    assert "fake engine 1 pid" not in server.output[server.processes.at :]
    assert server.stop() == [0]
    assert daemon.wait(WAIT_SECONDS) == 0
    relay.close()


def test_a_spare_daemon_waits_and_takes_the_place_of_one_that_is_killed(serve):
    server, port = head_of_two(serve, "--no-standby")
    first = server.start_daemon(f"127.0.0.1:{port}")
    server.until("epoch 1 runs on 2 ranks")
    spare = server.start_daemon(f"127.0.0.1:{port}")
    server.until("no head yet .refused by the head: all 2 ranks have joined")
    first.kill()
    server.until("epoch 2 runs on 2 ranks")
    assert server.stop() == [0]
    assert spare.wait(WAIT_SECONDS) == 0
