"""A simulated server around the membership's state machine: ranks, links and engines that fail, in simulated time.

`World` delivers events as the coordinator does and carries out its actions. Engines check that they are told nothing out of turn.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ep_runtime.supervise import events
from ep_runtime.supervise.backoff import start_pause
from ep_runtime.supervise.events import Limits
from ep_runtime.supervise.evidence import ENGINE_EXITED, ENGINE_KILLED
from ep_runtime.supervise.membership import Membership
from protocol.messages import (
    BeginEpoch,
    EndEpoch,
    EpochLeft,
    EpochOpened,
    Join,
    KillEngine,
    Loaded,
    OpenEpoch,
    Progress,
    Ready,
    Refused,
    Report,
    Stop,
)
from tests.support.supervise_judge import Judge

TICK = 0.25


@dataclass(eq=False)
class Link:
    """One connection of a supervisor: in order both ways, with delays; what is under way when it is cut is lost."""

    world: World
    supervisor: Supervisor
    alive: bool = True
    rank: int | None = None
    _free: dict[str, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})

    def _carry(self, way: str, deliver: Callable[[], None]) -> None:
        at = max(self.world.time + self.world.random.choice((0.0005, 0.002, 0.05, 0.4)), self._free[way])
        self._free[way] = at
        self.world.at(at, lambda: deliver() if self.alive else None)

    def up(self, message: Any) -> None:
        self._carry("up", lambda: self.world.hear(self, message))

    def down(self, message: Any) -> None:
        self._carry("down", lambda: self.supervisor.told(message))

    def cut(self, noticed_after: float) -> None:
        self.alive = False
        self.world.later(noticed_after, lambda: self.world.ended(self))


@dataclass(eq=False)
class Engine:
    """One engine process. `hung`: it answers nothing and does not move."""

    number: int
    loaded: bool = False
    alive: bool = True
    hung: bool = False
    epoch: int | None = None
    asked: set[int] = field(default_factory=set)
    was_ready: bool = False
    alone: str = ""
    moves: int = 0
    orders: deque[Any] | None = None
    """Set while it leaves an epoch: what it is told meanwhile waits."""


class Supervisor:
    """Keeps one rank's engine as the real one does."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.boot = f"boot {rank} {next(world.numbers)}"
        self.engine: Engine | None = None
        self.failures = 0
        self.stopping = False
        self.link = Link(world, self, alive=False)

    def connect(self) -> None:
        if self.link.alive:
            return
        self.link = Link(self.world, self)
        self.link.up(Join(token="", host="h", boot=self.boot, rank=self.rank, device="cpu", package="p"))

    def say(self, message: Any, engine: Engine | None = None) -> None:
        if engine is None or (engine.alive and not engine.hung):
            self.link.up(message)

    # The engine

    def start_engine(self) -> None:
        if self.stopping or self.world.over:
            return
        engine = self.engine = Engine(next(self.world.numbers))
        self.world.later(self.world.random.uniform(0.05, 2.0), lambda: self._loaded(engine))

    def _loaded(self, engine: Engine) -> None:
        if engine.alive and not engine.hung:
            engine.loaded = True
            self.say(Loaded(rank=self.rank, seconds={"spawn": 0.0, "import": 0.1, "load": 0.2}))

    def die(self, error: str, outside: bool) -> None:
        """The engine ends; it is reported and replaced."""
        engine = self.engine
        if engine is None or not engine.alive:
            return
        engine.alive = False
        epoch = max(engine.asked, default=0) if engine.epoch is None else engine.epoch
        report = Report(self.rank, epoch, error, "its engine ended", ended=True, outside=outside, alone=engine.alone)
        self.say(report)
        self.world.peer_died(self, engine)
        self.failures = 0 if engine.was_ready else self.failures + 1
        self.engine = None
        self.world.later(start_pause(self.failures), self.start_engine)

    # Orders

    def told(self, message: Any) -> None:
        engine = self.engine
        if isinstance(message, Stop):
            self.stopping = True
            if self.engine is not None:
                self.engine.alive = False
            self.link.cut(self.world.random.uniform(0.0, 2.0))
        elif isinstance(message, KillEngine):
            self.die("EpDeadline", outside=False)
        elif engine is not None and engine.loaded and engine.alive:
            self._order(engine, message)

    def _order(self, engine: Engine, message: Any) -> None:
        if engine.orders is not None:
            engine.orders.append(message)
            return
        epoch = message.epoch
        assert epoch not in engine.asked, f"rank {self.rank}: {message} for an epoch that it was told to leave"
        match message:
            case OpenEpoch():
                assert self.rank == 0
                assert engine.epoch is None
                self._soon(engine, lambda: self._opened(engine, epoch))
            case BeginEpoch():
                assert engine.epoch is None, f"rank {self.rank} is in epoch {engine.epoch}, and told to begin {epoch}"
                engine.epoch = epoch
                engine.alone = f"request {epoch}" if self.rank == 0 and self.world.random.random() < 0.5 else ""
                self._soon(engine, lambda: self._ready(engine, epoch))
                self._progress(engine, epoch)
            case EndEpoch():
                assert engine.epoch in (None, epoch)
                engine.asked.add(epoch)
                if engine.epoch is None:
                    self.say(EpochLeft(epoch=epoch, rank=self.rank), engine)
                else:
                    engine.orders = deque()
                    self._soon(engine, lambda: self._leave(engine, epoch), 0.05)

    def _soon(self, engine: Engine, act: Callable[[], None], late: float = 0.0) -> None:
        """`late` is the chance that it takes longer than anybody waits for it."""
        after = 2.1 if self.world.random.random() < late else self.world.random.choice((0.0, 0.01, 0.3, 1.2))
        self.world.later(after, lambda: act() if engine.alive and not engine.hung else None)

    def _opened(self, engine: Engine, epoch: int) -> None:
        if epoch not in engine.asked:
            self.say(EpochOpened(epoch=epoch, store="s", links="l"), engine)

    def _ready(self, engine: Engine, epoch: int) -> None:
        if engine.epoch == epoch and epoch not in engine.asked:
            engine.was_ready = True
            self.say(Ready(epoch=epoch, rank=self.rank), engine)

    def _leave(self, engine: Engine, epoch: int) -> None:
        engine.epoch = None
        alone, engine.alone = engine.alone, ""
        self.say(EpochLeft(epoch=epoch, rank=self.rank, alone=alone), engine)
        orders, engine.orders = engine.orders or deque(), None
        while orders:
            self._order(engine, orders.popleft())

    def _progress(self, engine: Engine, epoch: int) -> None:
        if not engine.alive or engine.epoch != epoch:
            return
        engine.moves += not engine.hung
        at = Progress(self.rank, epoch, engine.moves, "PING", "WAITING", 0, engine.moves, 0.0)
        self.say(at)
        self.world.later(TICK, lambda: self._progress(engine, epoch))


class World:
    """N ranks, a frontend, and the membership. `faults` is what `fault` may do."""

    def __init__(self, seed: int, world: int, limits: Limits, judge: Judge) -> None:
        self.random = random.Random(seed)
        self.time = 1000.0
        self.late = 0.0
        self.numbers = itertools.count()
        self.machine = Membership(world, limits)
        self.members: dict[int, Link] = {}
        self.over: events.Finish | None = None
        self.judge = judge
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._queue: deque[events.Event] = deque()
        self._frontend = 0
        self.supervisors = [Supervisor(self, rank) for rank in range(world)]
        self.perform(self.machine.start(self.time))
        for supervisor in self.supervisors:
            self.later(self.random.uniform(0, 1), supervisor.connect)
        self._tick()

    # Time

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time, next(self._order), act))

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.time + seconds, act)

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        while self._heap and self._heap[0][0] <= until and not self.over and not done():
            self.time, _, act = heapq.heappop(self._heap)
            act()

    def _tick(self) -> None:
        self.notify(events.Tick())
        self.later(TICK, self._tick)

    # The coordinator

    def hear(self, link: Link, message: Any) -> None:
        if link.rank is not None:
            self.notify(events.Received(link.rank, message))
            return
        assert isinstance(message, Join)
        answer = self.machine.admit(message, local=link.supervisor.rank == 0)
        if isinstance(answer, Refused):
            link.alive = False
            if not link.supervisor.stopping:
                self.later(0.5, link.supervisor.connect)
            return
        if answer in self.members:
            self.members[answer].alive = False
            self.ended(self.members[answer])
        assert answer == link.supervisor.rank
        link.rank = answer
        self.members[answer] = link
        self.notify(events.Joined(answer, message.boot))
        supervisor = link.supervisor
        engine = supervisor.engine
        if engine is None:
            supervisor.start_engine()
        elif engine.loaded and engine.epoch is None:
            supervisor.say(Loaded(rank=answer))

    def ended(self, link: Link) -> None:
        if link.rank is not None and self.members.get(link.rank) is link:
            del self.members[link.rank]
            self.notify(events.Left(link.rank))

    def notify(self, event: events.Event) -> None:
        if self.over:
            return
        self._queue.append(event)
        if len(self._queue) > 1:
            return
        while self._queue and not self.over:
            self.judge.event(self._queue[0], self.time)
            self.perform(self.machine.handle(self._queue[0], self.time, self.late))
            self._queue.popleft()

    def perform(self, actions: list[events.Action]) -> None:
        for action in actions:
            self.judge.action(action, self.time)
            match action:
                case events.Send(rank, message):
                    if rank in self.members:
                        self.members[rank].down(message)
                case events.Drop(rank):
                    link = self.members[rank]
                    link.alive = False
                    self.ended(link)
                    self.later(0.3, partial(self.lost_head, link.supervisor))
                case events.StartFrontend():
                    self._frontend += 1
                case events.EndFrontend():
                    self.end_frontend(self.random.uniform(0, 3), "exit status 0")
                case events.Finish():
                    self.over = action

    def end_frontend(self, after: float, how: str, ready: bool = True) -> None:
        number = self._frontend
        if not self.machine.frontend.alive:
            return

        def end() -> None:
            if number == self._frontend and self.machine.frontend.alive:
                self.notify(events.FrontendEnded(how, ready=ready))

        self.later(after, end)

    # Faults

    def peer_died(self, dead: Supervisor, engine: Engine) -> None:
        """Others in the same epoch may see it, and say so before or after its own supervisor does."""
        for other in self.supervisors:
            peer = other.engine
            if other is not dead and peer is not None and peer.epoch is not None and peer.epoch == engine.epoch:
                self.report_lost(other, peer, peer.epoch)

    def report_lost(self, supervisor: Supervisor, engine: Engine, epoch: int) -> None:
        def report() -> None:
            if engine.epoch == epoch and epoch not in engine.asked:
                supervisor.say(Report(supervisor.rank, epoch, "EpPeerGone", "a link ended", alone=engine.alone), engine)

        if self.random.random() < 0.7:
            self.later(self.random.choice((0.0, 0.001, 0.2)), report)

    def lost_head(self, supervisor: Supervisor, again_after: float = 0.5) -> None:
        """The supervisor's side of a lost link: its engine leaves its epoch, or is killed; then it connects again."""
        engine = supervisor.engine
        if supervisor.stopping:
            return
        if engine is not None and (engine.hung or engine.epoch is not None):
            if engine.hung or self.random.random() < 0.3:
                engine.alive, supervisor.engine = False, None
                self.peer_died(supervisor, engine)
            else:
                if engine.epoch is not None:
                    engine.asked.add(engine.epoch)
                engine.epoch = engine.orders = None
        self.later(again_after, supervisor.connect)

    def fault(self) -> None:
        """One of the things that go wrong, to a rank chosen at random."""
        supervisor = self.random.choice(self.supervisors)
        engine = supervisor.engine
        kind = self.random.choice(
            ("kill", "kill", "crash", "speak and crash", "hang", "diverge", "links", "cut", "restart", "front")
        )
        alive = engine is not None and engine.alive and not engine.hung
        if kind == "front":
            self.end_frontend(0.0, "killed by SIGKILL")
        elif kind == "kill":
            supervisor.die(ENGINE_KILLED, outside=True)
        elif kind == "crash":
            supervisor.die(ENGINE_EXITED, outside=False)
        elif kind in ("cut", "restart") and supervisor.rank > 0 and supervisor.link.alive and not supervisor.stopping:
            supervisor.link.cut(self.random.choice((0.001, 0.3, 15.0)))
            if kind == "restart":
                supervisor.boot = f"boot {supervisor.rank} {next(self.numbers)}"
                if engine is not None:
                    engine.alive, supervisor.engine = False, None
                    self.peer_died(supervisor, engine)
            self.lost_head(supervisor, self.random.choice((0.01, 1.0, 5.0)))
        elif alive and engine is not None and kind == "hang":
            engine.hung = engine.loaded  # one that hangs while it loads is a matter of the load deadline, which is final
        elif alive and engine is not None and engine.epoch is not None and engine.epoch not in engine.asked:
            epoch = engine.epoch
            if kind == "links":
                self.report_lost(supervisor, engine, epoch)
            elif kind in ("diverge", "speak and crash"):
                supervisor.say(Report(supervisor.rank, epoch, "EpDiverged", "ranks differ", alone=engine.alone), engine)
                if kind == "speak and crash":
                    supervisor.die(ENGINE_EXITED, outside=False)
