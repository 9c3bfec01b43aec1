"""Who takes part, and what happens next: a pure state machine. Events go in, actions come out, nothing else is touched.

```
JOINING -> LOADING -> OPENING -> FORMING -> RUNNING -> DRAINING -> STOPPING -> over
   any of them, on evidence of a failure:              --------->  STOPPING -> over
```
Evidence (a process ended, a rank reported, a deadline passed) arrives as events and is kept apart from what follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ep_runtime.supervise.evidence import Evidence, root_cause
from protocol.messages import (
    BeginEpoch,
    EpochOpened,
    Join,
    Loaded,
    OpenEpoch,
    Progress,
    Ready,
    Report,
    Stop,
    ToCoordinator,
    ToSupervisor,
)

FIRST_EPOCH = 1
FRONTEND_KILL_SECONDS = 2.0
"""What the frontend gets beyond its drain time before it is killed."""
STOP_GRACE_SECONDS = 3.0
"""What engines get to leave after SHUTDOWN before SIGTERM; see `supervisor.KILL_SECONDS` for the tier after."""
STOPPING_SECONDS = 8.0
"""What every member gets to be gone; longer than its own tiers take."""


class Phase(Enum):
    """Where the server is."""

    JOINING = "rendezvous"
    LOADING = "load"
    OPENING = "opening the epoch"
    FORMING = "handshake"
    RUNNING = "running"
    DRAINING = "drain"
    STOPPING = "stopping"


# Events


@dataclass(frozen=True, slots=True)
class Joined:
    """A supervisor was admitted as this rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class Received:
    """A message of an admitted rank."""

    rank: int
    message: ToCoordinator


@dataclass(frozen=True, slots=True)
class Left:
    """A rank's connection ended."""

    rank: int


@dataclass(frozen=True, slots=True)
class FrontendEnded:
    """The frontend process ended; `how` is in words."""

    how: str
    clean: bool


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A signal or a message asks for an ordered end."""

    reason: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The deadline set last has passed."""


Event = Joined | Received | Left | FrontendEnded | StopAsked | DeadlinePassed


# Actions


@dataclass(frozen=True, slots=True)
class Send:
    """Send to one rank's supervisor."""

    rank: int
    message: ToSupervisor


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Replace the deadline; None: there is none."""

    seconds: float | None


@dataclass(frozen=True, slots=True)
class EndFrontend:
    """SIGTERM to the frontend, SIGKILL `grace` seconds later."""

    grace: float


@dataclass(frozen=True, slots=True)
class TellFrontend:
    """The engine gives no more results: every open request is to be answered."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Announce:
    """A line for the operator."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The server is over; `status` is the exit status of serve, `cause` why it is not 0."""

    status: int
    cause: str = ""


Action = Send | SetDeadline | EndFrontend | TellFrontend | Announce | Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Seconds for each phase."""

    rendezvous: float
    load: float
    handshake: float
    warm: float
    drain: float


@dataclass(kw_only=True, slots=True)
class Membership:
    """The state machine of one server with a fixed world size."""

    world: int
    deadlines: Deadlines
    phase: Phase = Phase.JOINING
    epoch: int = FIRST_EPOCH
    evidence: list[Evidence] = field(default_factory=list)
    members: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    """Ranks that the current phase waits for; read in sorted order only."""
    loaded: set[int] = field(default_factory=set)
    frontend_alive: bool = True
    progress: dict[int, Progress] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = set(range(self.world))

    def start(self) -> list[Action]:
        """The first actions."""
        return [SetDeadline(self.deadlines.rendezvous)]

    def admit(self, join: Join, local: bool) -> int | str:
        """The rank that a supervisor gets, or why it is refused. `local`: it is the coordinator's own, and no other may be rank 0.

        A daemon that names no rank gets the lowest free one.
        """
        if self.phase is not Phase.JOINING:
            return f"the server is not taking ranks: {self.phase.value}"
        if local:
            return 0
        free = [rank for rank in range(1, self.world) if rank not in self.members]
        if join.rank is None:
            return free[0] if free else f"all {self.world} ranks have joined"
        if not 0 < join.rank < self.world:
            return f"rank {join.rank} is outside the ranks 1 to {self.world - 1} that may join"
        return join.rank if join.rank in free else f"rank {join.rank} has joined already"

    def handle(self, event: Event) -> list[Action]:
        """What follows from one event."""
        match event:
            case Joined(rank):
                return self._joined(rank)
            case Received(rank, message):
                return self._received(rank, message)
            case Left(rank):
                return self._left(rank)
            case FrontendEnded():
                return self._frontend_ended(event)
            case StopAsked(reason):
                return self._stop_asked(reason)
            case DeadlinePassed():
                return self._deadline_passed()

    def _joined(self, rank: int) -> list[Action]:
        self.members.add(rank)
        if not self._arrived(rank):
            return []
        loading = self._enter(Phase.LOADING, self.deadlines.load)
        self.waiting -= self.loaded
        return loading if self.waiting else self._all_loaded()

    def _received(self, rank: int, message: ToCoordinator) -> list[Action]:
        match message:
            case Report():
                return self._fail(Evidence(rank, message.error, message.message))
            case Stop():
                return self._stop_asked(f"rank {rank}: {message.reason}")
            case Progress():
                self.progress[rank] = message
                return []
            case _ if self.phase in (Phase.DRAINING, Phase.STOPPING):
                return []
            case Loaded() if self.phase in (Phase.JOINING, Phase.LOADING):
                return self._loaded(rank)
            case EpochOpened() if self.phase is Phase.OPENING and rank == 0 and message.epoch == self.epoch:
                return self._opened(message)
            case Ready() if self.phase is Phase.FORMING and message.epoch == self.epoch:
                return self._ready(rank)
        return self._fail(Evidence(rank, "", f"sent {type(message).__name__} during {self.phase.value}"))

    def _loaded(self, rank: int) -> list[Action]:
        self.loaded.add(rank)  # while others have not even joined, too
        if self.phase is Phase.JOINING or not self._arrived(rank):
            return []
        return self._all_loaded()

    def _all_loaded(self) -> list[Action]:
        opening = self._enter(Phase.OPENING, self.deadlines.handshake)
        self.waiting = {0}
        return [*opening, Send(0, OpenEpoch(epoch=self.epoch, world=self.world))]

    def _opened(self, opened: EpochOpened) -> list[Action]:
        begin = BeginEpoch(epoch=self.epoch, world=self.world, store=opened.store, links=opened.links)
        return [
            *self._enter(Phase.FORMING, self.deadlines.handshake + self.deadlines.warm),
            *(Send(rank, begin) for rank in range(self.world)),
        ]

    def _ready(self, rank: int) -> list[Action]:
        if not self._arrived(rank):
            return []
        running = self._enter(Phase.RUNNING, None)
        return [*running, Announce(f"epoch {self.epoch} runs on {self.world} rank{'s' if self.world > 1 else ''}")]

    def _left(self, rank: int) -> list[Action]:
        self.members.discard(rank)
        if self.phase is Phase.STOPPING:
            return self._over()
        return self._fail(Evidence(rank, "", "its supervisor is gone"))

    def _frontend_ended(self, event: FrontendEnded) -> list[Action]:
        self.frontend_alive = False
        if self.phase is Phase.DRAINING:
            return self._stop_engines("drained", STOP_GRACE_SECONDS)
        if self.phase is Phase.STOPPING:
            return self._over()
        return self._fail(Evidence(None, "", f"the frontend ended: {event.how}"))

    def _stop_asked(self, reason: str) -> list[Action]:
        match self.phase:
            case Phase.DRAINING | Phase.STOPPING:
                return []
            case Phase.RUNNING:
                self.phase, self.waiting = Phase.DRAINING, set()
                grace = self.deadlines.drain + FRONTEND_KILL_SECONDS
                return [Announce(f"stopping ({reason})"), SetDeadline(None), EndFrontend(grace)]
            case _:
                return [Announce(f"stopping ({reason})"), EndFrontend(FRONTEND_KILL_SECONDS), *self._stop_engines(reason, 0.0)]

    def _deadline_passed(self) -> list[Action]:
        if self.phase is Phase.STOPPING:
            late = ", ".join(str(rank) for rank in sorted(self.members)) or "none"
            self.evidence.append(Evidence(None, "", f"not ended after {STOPPING_SECONDS:g} s: ranks {late}"))
            return [self._finish()]
        return self._fail(Evidence(None, "", f"{self.phase.value}: {self._late()}"))

    def _late(self) -> str:
        ranks = sorted(self.waiting)
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        seen = [self.progress[rank] for rank in ranks if rank in self.progress]
        where = "; ".join(f"rank {at.rank} was last seen in step {at.step}, {at.phase}" for at in seen)
        return f"nothing from {named} after {self._allowed():g} s" + (f" ({where})" if where else "")

    def _allowed(self) -> float:
        match self.phase:
            case Phase.JOINING:
                return self.deadlines.rendezvous
            case Phase.LOADING:
                return self.deadlines.load
            case Phase.FORMING:
                return self.deadlines.handshake + self.deadlines.warm
            case _:
                return self.deadlines.handshake

    def _arrived(self, rank: int) -> bool:
        """Note that `rank` did what the phase waits for; True when it was the last."""
        self.waiting.discard(rank)
        return not self.waiting

    def _enter(self, phase: Phase, seconds: float | None) -> list[Action]:
        self.phase = phase
        self.waiting = set() if phase is Phase.RUNNING else set(range(self.world))
        return [SetDeadline(seconds)]

    def _fail(self, evidence: Evidence) -> list[Action]:
        announce: list[Action] = [] if self.evidence else [Announce(f"failed: {evidence}")]
        self.evidence.append(evidence)
        if self.phase is Phase.STOPPING:
            return announce
        ends: list[Action] = []
        if self.frontend_alive:
            ends = [TellFrontend(self.epoch, str(evidence)), EndFrontend(FRONTEND_KILL_SECONDS)]
        return [*announce, *ends, *self._stop_engines(str(evidence), 0.0)]

    def _stop_engines(self, reason: str, grace: float) -> list[Action]:
        self.phase = Phase.STOPPING
        stops = [Send(rank, Stop(reason=reason, grace=grace)) for rank in sorted(self.members)]
        return [*stops, SetDeadline(STOPPING_SECONDS), *self._over()]

    def _over(self) -> list[Action]:
        return [] if self.members or self.frontend_alive else [self._finish()]

    def _finish(self) -> Finish:
        return Finish(1, str(root_cause(self.evidence))) if self.evidence else Finish(0)
