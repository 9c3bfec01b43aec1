"""What counts as a loop's own time, and that a step is launched before the one before it is waited for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from ep_runtime.engine.busy import BusyTime
from ep_runtime.engine.executor import Executor
from ep_runtime.engine.main import collect_garbage
from ep_runtime.engine.pending import PendingStep
from ep_runtime.engine.worker import Worker
from protocol.ack import Ack, AckStatus
from protocol.commands import BATCH, Decode, Forward, Ping, Shutdown, Span, Wanted
from protocol.frame import Frame, encode
from tests.support.checkpoints import make_checkpoint
from tests.support.engine import Driver, head_of
from tests.support.rank_context import RankContext

CONTEXT = RankContext(rank=0, world=1, epoch=0, store_port=0, store_fd=None, runtime_dir=Path(), kwargs={})
LOOKS = 4
"""At a step's results before they are there."""


class Clock:
    """Seconds that pass in sleeps and in forwards alone, each of a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.slept = 0.0
        monkeypatch.setattr("ep_runtime.engine.busy.monotonic", lambda: self.now)
        monkeypatch.setattr("ep_runtime.engine.in_flight.time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += 1.0
        self.slept += 1.0


@contextmanager
def slow_device(folder: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[tuple[Driver, list[str]]]:
    """A head whose results come after LOOKS looks at them, and what it did: "forward", "wait" and "read"."""
    events: list[str] = []
    looks: WeakKeyDictionary[PendingStep, int] = WeakKeyDictionary()
    read = PendingStep.read

    def arrange(executor: Executor) -> None:
        execute = executor.execute

        def launching(frame: Any, *rest: Any) -> None:
            execute(frame, *rest)
            if isinstance(frame.command, Forward):
                events.append("forward")
                clock.now += 1.0

        executor.execute = launching  # type: ignore[method-assign, assignment]

    def ready(step: PendingStep) -> bool:
        looks[step] = looks.get(step, 0) + 1
        if looks[step] < LOOKS:
            events.append("wait")
        return looks[step] >= LOOKS

    def reading(step: PendingStep) -> Any:
        events.append("read")
        return read(step)

    monkeypatch.setattr(PendingStep, "ready", ready)
    monkeypatch.setattr(PendingStep, "read", reading)
    model = make_checkpoint("mixtral", "plain", folder / "model")
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with head_of(CONTEXT, str(model), lookahead=True, digest_interval=0, arrange=arrange, **sizes) as driver:
        assert driver is not None
        yield driver, events


def test_a_wait_that_has_ended_is_no_busy_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("ep_runtime.engine.busy.monotonic", lambda: now)
    busy = BusyTime()
    now = 13.0
    assert busy.seconds == 3.0
    began, now = now, 18.0
    busy.waited(began)
    assert busy.seconds == 3.0
    now = 18.5
    assert busy.seconds == 3.5


def test_steps_of_many_sequences_collect_no_garbage(tmp_path: Path) -> None:
    threshold, collected = gc.get_threshold(), []

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    model = make_checkpoint("mixtral", "plain", tmp_path / "model")
    sizes: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 200, "max_num_batched_tokens": 512}
    try:
        with head_of(CONTEXT, str(model), digest_interval=0, **sizes) as driver:
            assert driver is not None
            for name in range(200):
                driver.submit(str(name), [5, 6], max_tokens=24)
            while not all(answer.tokens for answer in driver.answers.values()):
                driver.turn()
            collect_garbage()
            first = driver.broadcaster.step
            gc.callbacks.append(note)
            for _ in range(16):
                driver.head.turn(idle_wait_s=0.0)
            gc.callbacks.remove(note)
            assert driver.broadcaster.step == first + 16
            driver.finish()
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
    assert collected == []


def test_a_worker_knows_how_long_its_forwards_kept_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A second in a forward, and none while it waits for a command."""
    now = 10.0
    decode = Decode(spans=[Span(0, 3, 1, fed=True, sampled=True, wanted=Wanted.LAST, new_blocks=[])])
    frames = [encode(body, BATCH, step=step) for step, body in enumerate([decode, Ping(), decode, Shutdown()])]

    class Link:
        rank, epoch = 1, 0

        def receive(self) -> bytes:
            nonlocal now
            now += 7.0
            return frames.pop(0)

        def ack(self, ack: Ack) -> None:
            pass

    def run_command(executor: Any, frame: Frame, *rest: Any) -> tuple[Ack, None]:
        nonlocal now
        now += 1.0
        return Ack(1, 0, frame.preamble.step, AckStatus.OK), None

    monkeypatch.setattr("ep_runtime.engine.worker.run_command", run_command)
    monkeypatch.setattr("ep_runtime.engine.worker.time", SimpleNamespace(monotonic=lambda: now))
    caplog.set_level("INFO", "ep_runtime.engine.worker")
    nothing: Any = None
    link: Any = Link()
    worker = Worker(nothing, link, version=2, device=torch.device("cpu"))
    worker.run(nothing)
    assert list(worker.forward_seconds) == [1.0, 1.0]
    assert caplog.messages == ["rank 1: host time of a forward, median of the last 2: 1000.000 ms"]


def test_host_time_has_the_forwards_and_none_of_the_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with slow_device(tmp_path, monkeypatch, clock) as (driver, events):
        driver.submit("0", [5, 6, 7], max_tokens=10)
        answers = driver.finish()
        assert len(answers["0"].tokens) == 10
        forwards = events.count("forward")
        assert forwards >= 10
        assert clock.slept >= forwards
        assert driver.head.host_seconds == forwards


def test_a_step_is_launched_before_the_one_before_it_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_device(tmp_path, monkeypatch, Clock(monkeypatch)) as (driver, events):
        for name in ("0", "1", "2"):
            driver.submit(name, [5, 6, 7], max_tokens=12)
        driver.finish()
    # Behind the last forwards nothing is left to launch.
    launched = read = 0
    for event in events[: len(events) - events[::-1].index("forward")]:
        launched, read = launched + (event == "forward"), read + (event == "read")
        if event == "wait":
            assert launched - read == 2
