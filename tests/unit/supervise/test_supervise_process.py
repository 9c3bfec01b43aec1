"""Real children: their end is seen at once, nothing survives SIGKILL or the parent, nothing of their group stays behind."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ep_runtime.supervise.loop import Loop
from ep_runtime.supervise.process import Child, Exit
from tests.support.python_path import python_path

WAIT_SECONDS = 15.0
STAND_INS = """
import os, signal, subprocess, sys, time
def tell(*words):
    os.write(int(sys.argv[2]), (" ".join(map(str, words)) + "\\n").encode())
match sys.argv[1]:
    case "exits":
        sys.exit(5)
    case "sleeps":
        tell(os.getpid(), os.getppid(), os.getsid(0))
        time.sleep(600)
    case "ignores":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell(os.getpid())
        time.sleep(600)
    case "forks":
        inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        tell(os.getpid(), inner.pid)
        sys.exit(0)
"""


@pytest.fixture
def spawn(tmp_path):
    """Start the stand-in module in a mode; returns the child and the numbers that it tells."""
    (tmp_path / "stand_in.py").write_text(STAND_INS)
    environment = os.environ | {"PYTHONPATH": python_path(tmp_path)}
    children = []

    def start(mode: str) -> tuple[Child, list[int]]:
        read, write = os.pipe()
        child = Child(mode, "stand_in", [mode, str(write)], environment=environment, pass_fds=[write])
        os.close(write)
        children.append(child)
        with os.fdopen(read) as told:
            return child, [int(word) for word in told.readline().split()]

    yield start
    for child in children:
        child.send(signal.SIGKILL)
        child.reap()


def ended(child: Child) -> bool:
    return bool(select.select([child.pidfd], [], [], WAIT_SECONDS)[0])


def test_the_pidfd_tells_of_the_end_and_reap_of_the_status(spawn):
    child, _ = spawn("exits")
    assert ended(child)
    assert child.reap() == Exit(status=5)
    assert not child.alive
    child.send(signal.SIGKILL)  # the pid is free by now: nobody may be hit


def test_a_child_is_the_leader_of_a_session_of_its_own(spawn):
    child, (pid, parent, session) = spawn("sleeps")
    assert (pid, parent, session) == (child.pid, os.getpid(), child.pid)
    child.send(signal.SIGTERM)
    assert ended(child)
    assert str(child.reap()) == "killed by SIGTERM"


def test_sigkill_ends_a_child_that_ignores_sigterm(spawn):
    child, _ = spawn("ignores")
    child.send(signal.SIGTERM)
    assert not select.select([child.pidfd], [], [], 0.2)[0]
    child.send(signal.SIGKILL)
    assert ended(child)
    assert child.reap() == Exit(signal=signal.SIGKILL)


def test_sigkill_ends_a_stopped_child(spawn):
    child, _ = spawn("sleeps")
    child.send(signal.SIGSTOP)
    child.send(signal.SIGKILL)
    assert ended(child)
    assert child.reap() == Exit(signal=signal.SIGKILL)


def test_what_a_dead_child_started_dies_with_it(spawn):
    child, (_, inner) = spawn("forks")
    assert ended(child)
    grandchild = psutil.Process(inner)
    child.reap()
    psutil.wait_procs([grandchild], timeout=5.0)
    survived = grandchild.is_running() and grandchild.status() != psutil.STATUS_ZOMBIE
    if survived:
        grandchild.kill()
    assert not survived


PARENT = """
import os, sys, time
from ep_runtime.supervise.process import Child
child = Child("c", "stand_in", ["sleeps", sys.argv[1]], pass_fds=[int(sys.argv[1])])
time.sleep(600)
"""


def test_a_child_dies_when_its_parent_is_killed(tmp_path):
    (tmp_path / "stand_in.py").write_text(STAND_INS)
    read, write = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(write)], env=os.environ | {"PYTHONPATH": python_path(tmp_path)}, pass_fds=[write]
    )
    os.close(write)
    with os.fdopen(read) as told:
        child = psutil.Process(int(told.readline().split()[0]))
        parent.kill()
        parent.wait()
        pipe_ends = bool(select.select([told], [], [], WAIT_SECONDS)[0])
    alive = child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    if alive and not pipe_ends:
        child.kill()
    assert pipe_ends, "the child outlived its parent"


def test_a_child_whose_parent_is_gone_already_does_not_begin():
    command = [sys.executable, "-P", "-m", "ep_runtime.supervise.child", "1", "-", "this"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert result.returncode == 1
    assert "ended before its child began" in result.stderr


def test_the_loop_runs_timers_in_order_and_delivers_signals():
    seen = []
    with Loop() as loop:
        loop.on_signals([signal.SIGUSR1], lambda number: (seen.append(number), loop.stop()))
        loop.later(0.02, lambda: (seen.append("second"), os.kill(os.getpid(), signal.SIGUSR1)))
        loop.later(0.01, lambda: seen.append("first"))
        loop.later(0.005, lambda: seen.append("never")).cancel()
        loop.run()
    assert seen == ["first", "second", signal.SIGUSR1]
    assert signal.signal(signal.SIGUSR1, signal.SIG_DFL) is signal.SIG_IGN, "a process whose loop is over ends in order"


def test_the_loop_does_not_call_for_a_descriptor_that_was_forgotten_in_the_same_round():
    calls = []
    one, two = os.pipe(), os.pipe()
    with Loop() as loop:

        def first(own: int, other: int) -> None:
            calls.append(own)
            loop.forget(other)
            loop.later(0, loop.stop)

        loop.watch(one[0], lambda: first(one[0], two[0]))
        loop.watch(two[0], lambda: first(two[0], one[0]))
        os.write(one[1], b"x")
        os.write(two[1], b"x")
        loop.run()
    assert len(set(calls)) == 1
    for fd in (*one, *two):
        os.close(fd)
