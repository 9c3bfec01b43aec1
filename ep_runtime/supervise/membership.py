"""Who takes part, and what happens next: a pure state machine. Events go in with the time, actions come out, and that is all.

```
GATHERING -> OPENING -> FORMING -> RUNNING        until every rank is idle; the head opens; all connect; commands run
    ^----------+-----------+----------'           evidence of a failure ends the epoch
any of them -> STOPPING -> over                   drained, or a failure that another start cannot cure
```
Evidence (a process ended, a rank reported, a deadline passed) is kept apart from what follows from it. The first of it ends the
epoch at once: the frontend is told, and every living engine is to leave and says when it has. When all have answered, the root
cause is known, and the frontend is told again, with what only the cause can say. The next epoch begins when every rank is idle.
"""

from __future__ import annotations

from ep_runtime.supervise.deadlines import Watch
from ep_runtime.supervise.ending import FRONTEND_KILL_SECONDS, Ending
from ep_runtime.supervise.epoch_record import LIVE, EpochRecord, Phase
from ep_runtime.supervise.events import (
    Action,
    Announce,
    Drop,
    EndFrontend,
    Event,
    FrontendEnded,
    Joined,
    Left,
    Limits,
    Received,
    Send,
    StartFrontend,
    StopAsked,
    TellFrontend,
    Tick,
)
from ep_runtime.supervise.evidence import DEADLINE, ENGINE_EXITED, START_REFUSALS, SUPERVISOR_GONE, Evidence, from_report
from ep_runtime.supervise.frontend_life import FrontendLife
from ep_runtime.supervise.limits import DROP_SECONDS, LEAVE_SECONDS, STOP_GRACE_SECONDS, Recoveries, Starts
from ep_runtime.supervise.ranks import Rank, State, admit, in_state, named, overdue, too_late
from ep_runtime.supervise.recovery import Stopwatch, in_words
from protocol.messages import (
    BeginEpoch,
    EndEpoch,
    EpochEnded,
    EpochLeft,
    EpochOpened,
    Join,
    KillEngine,
    Loaded,
    OpenEpoch,
    Progress,
    Ready,
    Recovered,
    Refused,
    Report,
    Stop,
    ToCoordinator,
)


class Membership:
    """The state machine of one server with a fixed world size.

    `handle(event, now, late)`: `now` is monotonic, `late` the seconds in all by which the caller was late (`deadlines.Lateness`);
    deadlines do not count them.
    """

    def __init__(self, world: int, limits: Limits) -> None:
        self.world = world
        self.phase = Phase.GATHERING
        self.ranks = [Rank(number, Starts(limits.failed_starts)) for number in range(world)]
        self.epoch = EpochRecord(0)
        self.frontend = FrontendLife(limits.failed_starts)
        self.ending = Ending()
        self._limits = limits
        self._watch = Watch(world)
        self._forming = Starts(limits.failed_starts)
        self._recoveries = Recoveries(limits.recoveries)
        self._stopwatch: Stopwatch | None = None
        self._ran = False  # some epoch has
        self._real = self._now = 0.0
        self._since = 0.0  # when the phase began
        self._open_at = 0.0

    def start(self, now: float) -> list[Action]:
        """The first actions."""
        self._real = self._now = self._since = now
        for rank in self.ranks:
            rank.become(State.ABSENT, now)
        return self._start_frontend()

    def admit(self, join: Join, local: bool) -> int | Refused:
        """The rank that a supervisor gets, or why it is refused; see `ranks.admit`."""
        if self.phase is Phase.STOPPING:
            return Refused("the server is stopping", again=True)
        return admit(self.ranks, join, local)

    def handle(self, event: Event, now: float, late: float = 0.0) -> list[Action]:
        """What follows from one event."""
        self._real, self._now = now, now - late
        match event:
            case Joined(rank, boot):
                self.ranks[rank].boot = boot
                self.ranks[rank].become(State.STARTING, self._now)
                return []
            case Received(rank, message):
                self._watch.heard(rank, self._now)
                return self._received(self.ranks[rank], message)
            case Left(rank):
                return self._left(self.ranks[rank])
            case FrontendEnded():
                return self._frontend_ended(event)
            case StopAsked(reason):
                return self._stop_asked(reason)
            case Tick():
                return self._tick()

    # Messages

    def _received(self, rank: Rank, message: ToCoordinator) -> list[Action]:
        if self.phase is Phase.STOPPING:
            return self._while_stopping(rank, message)
        match message:
            case Progress():
                self._watch.note(rank.number, message, self._now)
                return []
            case Report():
                return self._report(rank, message)
            case Stop():
                return self._stop_asked(f"rank {rank.number}: {message.reason}")
            case Loaded():
                return self._loaded(rank, message)
            case EpochLeft():
                return self._has_left(rank, message)
            case EpochOpened() if self.phase is Phase.OPENING and rank.number == 0 and self._of_epoch(message):
                return self._opened(message)
            case Ready() if self.phase is Phase.FORMING and rank.number in self.epoch.unready and self._of_epoch(message):
                return self._ready(rank)
            case EpochOpened(epoch) | Ready(epoch) if epoch < self.epoch.number or (
                self._of_epoch(message) and self.phase not in LIVE
            ):
                # It crossed with the word that the epoch is over, or is of an engine that took up the orders of the one before it.
                if isinstance(message, Ready):
                    rank.starts.ready()
                return []
        return self._out_of_turn(rank, message)

    def _of_epoch(self, message: EpochOpened | Ready | EpochLeft | Report) -> bool:
        return message.epoch == self.epoch.number

    def _loaded(self, rank: Rank, message: Loaded) -> list[Action]:
        if self.phase in LIVE:
            return self._end_epoch(Evidence(rank.number, ENGINE_EXITED, "its engine was replaced without a report", ended=True))
        if self._stopwatch is not None:
            self._stopwatch.loaded(message.seconds)
        rank.become(State.IDLE, self._now)
        return self._advance()

    def _has_left(self, rank: Rank, message: EpochLeft) -> list[Action]:
        if rank.state is not State.LEAVING or not self._of_epoch(message):
            if self.phase in LIVE and self._of_epoch(message):
                return self._out_of_turn(rank, message)
            return []  # an engine that was started meanwhile may answer too, once it has loaded
        self.epoch.note_alone(message.alone)
        if not rank.killed:
            rank.become(State.IDLE, self._now)
        return self._advance()

    def _report(self, rank: Rank, report: Report) -> list[Action]:
        evidence = from_report(rank.number, report)
        if self._of_epoch(report):
            self.epoch.note_alone(report.alone)
        if report.fatal or (not self._ran and report.error in START_REFUSALS):
            return self._give_up(str(evidence))
        if report.ended:
            return self._engine_ended(rank, evidence)
        if not evidence.consequence:
            rank.words = str(evidence)
        elif self.phase in LIVE and report.epoch < self.epoch.number:
            return []  # what it saw of others in an epoch that is over says nothing of this one
        return self._observed(evidence, rank.state)

    def _engine_ended(self, rank: Rank, evidence: Evidence) -> list[Action]:
        killed, before = rank.killed, rank.state
        rank.become(State.STARTING, self._now)
        if rank.starts.ended():
            cause = rank.words or str(evidence)
            return self._give_up(f"rank {rank.number}: {rank.starts.failed} starts in a row have failed; the last: {cause}")
        if killed and evidence.consequence:
            return self._advance()
        return self._observed(evidence, before)  # it had ended by itself before it could be killed

    def _left(self, rank: Rank) -> list[Action]:
        before = rank.state
        rank.become(State.ABSENT, self._now)
        if self.phase is Phase.STOPPING:
            return self._over()
        evidence = Evidence(rank.number, SUPERVISOR_GONE, "its supervisor is gone", ended=True, outside=True)
        return self._give_up(str(evidence)) if rank.number == 0 else self._observed(evidence, before)

    def _out_of_turn(self, rank: Rank, message: ToCoordinator) -> list[Action]:
        text = f"sent {type(message).__name__} out of turn, in epoch {self.epoch.number}, {self.phase.value}"
        if self.phase in LIVE:
            return self._end_epoch(Evidence(rank.number, "", text))
        return [Announce(f"rank {rank.number}: {text}", failure=True), *self._kill(rank, text)]

    # The life of an epoch

    def _observed(self, evidence: Evidence, state: State) -> list[Action]:
        """Evidence ends an epoch, or says more of how the last one ended, or comes between two. `state` is its rank's before it."""
        if self.phase in LIVE:
            return self._end_epoch(evidence)
        if self.epoch.undecided and state is State.LEAVING:
            self.epoch.evidence.append(evidence)
            return self._advance()
        return [Announce(f"between two epochs: {evidence}", failure=True), *self._advance()]

    def _advance(self) -> list[Action]:
        """What follows once all have answered, and once all are idle."""
        if self.phase is not Phase.GATHERING or in_state(self.ranks, State.LEAVING):
            return []
        actions = self._decide() if self.epoch.undecided else []
        if self.phase is Phase.GATHERING and len(in_state(self.ranks, State.IDLE)) == self.world and self._now >= self._open_at:
            actions += self._open()
        return actions

    def _open(self) -> list[Action]:
        self.epoch = EpochRecord(self.epoch.number + 1)
        self._enter(Phase.OPENING)
        if self._stopwatch is not None:
            self._stopwatch.opening(self._real)
        self.ranks[0].become(State.BUSY, self._now)
        return [Send(0, OpenEpoch(epoch=self.epoch.number, world=self.world))]

    def _opened(self, opened: EpochOpened) -> list[Action]:
        self._enter(Phase.FORMING)
        self.epoch.begun, self.epoch.unready = True, set(range(self.world))
        self._watch.begin(self.epoch.number, self._now)
        for rank in self.ranks:
            rank.become(State.BUSY, self._now)
        begin = BeginEpoch(epoch=self.epoch.number, world=self.world, store=opened.store, links=opened.links)
        return [Send(rank, begin) for rank in range(self.world)]

    def _ready(self, rank: Rank) -> list[Action]:
        rank.starts.ready()
        rank.words = ""
        self.epoch.unready.discard(rank.number)
        if self.epoch.unready:
            return []
        self._enter(Phase.RUNNING)
        self.epoch.ran = self._ran = True
        self._forming.ready()
        self._watch.begin(self.epoch.number, self._now)
        runs = f"epoch {self.epoch.number} runs on {self.world} rank{'s' if self.world > 1 else ''}"
        if self._stopwatch is None:
            return [Announce(runs)]
        seconds, self._stopwatch = self._stopwatch.running(self._real), None
        return [TellFrontend(Recovered(self.epoch.number, seconds)), Announce(f"{runs}; {in_words(seconds)}")]

    def _end_epoch(self, evidence: Evidence) -> list[Action]:
        self.epoch.evidence.append(evidence)
        self.epoch.undecided = True
        self._enter(Phase.GATHERING)
        if self._stopwatch is None:
            self._stopwatch = Stopwatch(self._real)
        self._stopwatch.failed(self._real)
        for number in in_state(self.ranks, State.IDLE, State.BUSY):
            self.ranks[number].become(State.LEAVING, self._now)
        # Those that start get it too: orders that were under way when an engine died may reach the next one, if it starts quickly.
        end = EndEpoch(epoch=self.epoch.number, reason=str(evidence))
        return [TellFrontend(self.epoch.at_once()), *(Send(number, end) for number in self._members()), *self._advance()]

    def _decide(self) -> list[Action]:
        """All have answered: the cause is known."""
        cause, ended = self.epoch.decide()
        assert self._stopwatch is not None
        self._stopwatch.left(self._real)
        told: list[Action] = [Announce(f"epoch {self.epoch.number} ended: {cause}", failure=True), TellFrontend(ended)]
        if self._recoveries.note(self._now):
            return [*told, *self._give_up(f"more than {self._limits.recoveries} epochs failed within an hour; the last: {cause}")]
        # Somebody else's act says nothing of whether an epoch can be formed.
        if (self.epoch.ran or not cause.outside) and self._forming.ended():
            return [*told, *self._give_up(f"{self._forming.failed} epochs in a row could not be formed; the last: {cause}")]
        self._open_at = self._now + self._forming.pause
        return told

    def _kill(self, rank: Rank, reason: str) -> list[Action]:
        rank.become(State.LEAVING, self._now)
        rank.killed = True
        return [Send(rank.number, KillEngine(reason=reason))]

    # Deadlines

    def _tick(self) -> list[Action]:
        if self.phase is Phase.STOPPING:
            return self._stopped_late() if self.ending.passed(self._now) else []
        if self.ending.draining and self.ending.passed(self._now):
            return self._stop_engines("the frontend has not ended", 0.0)
        starts = self._start_frontend() if self.frontend.is_due(self._now) else []
        return [*starts, *self._check_phase()]

    def _check_phase(self) -> list[Action]:
        limits, waited = self._limits, self._now - self._since
        match self.phase:
            case Phase.GATHERING:
                return self._check_ranks()
            case Phase.OPENING if waited >= limits.handshake:
                text = f"{self.phase.value}: nothing from rank 0 after {limits.handshake:g} s"
                return self._end_epoch(Evidence(None, DEADLINE, text))
            case Phase.FORMING if waited >= limits.handshake + limits.warm:
                late = named(sorted(self.epoch.unready))
                text = f"{self.phase.value}: {late} not ready after {limits.handshake + limits.warm:g} s; {self._watch.describe()}"
                return self._end_epoch(Evidence(None, DEADLINE, text))
            case Phase.RUNNING:
                return self._check_progress()
        return []

    def _check_ranks(self) -> list[Action]:
        late = too_late(self.ranks, self._now, self._limits)
        if late is not None:
            return self._give_up(late)
        actions: list[Action] = []
        for number in overdue(self.ranks, State.LEAVING, self._now, LEAVE_SECONDS):
            rank = self.ranks[number]
            if not rank.killed:
                text = f"it has not left epoch {self.epoch.number} after {LEAVE_SECONDS:g} s"
                actions += [Announce(f"rank {number}: {text}: its engine is killed", failure=True), *self._kill(rank, text)]
            elif self._now - rank.since >= DROP_SECONDS:
                actions.append(Drop(number, f"its engine was to be killed {DROP_SECONDS:g} s ago"))
        return actions or self._advance()

    def _check_progress(self) -> list[Action]:
        bound = self._limits.command
        silent = self._watch.silent(self._now, bound)
        if silent:
            return [Drop(number, f"nothing came for {bound:g} s") for number in silent]
        evidence = self._watch.judge(bound)
        return [] if evidence is None else self._end_epoch(evidence)

    def _enter(self, phase: Phase) -> None:
        self.phase, self._since = phase, self._now

    # The frontend

    def _start_frontend(self) -> list[Action]:
        self.frontend.started()
        return [StartFrontend()]

    def _frontend_ended(self, event: FrontendEnded) -> list[Action]:
        given_up = self.frontend.ended(event, self._now)
        if self.phase is Phase.STOPPING:
            return self._over()
        if self.ending.draining:
            return self._stop_engines("drained", STOP_GRACE_SECONDS)
        if given_up is not None:
            return self._give_up(given_up)
        starts = self._start_frontend() if self.frontend.is_due(self._now) else []
        return [Announce(f"the frontend ended: {event.how}; it is started again", failure=True), *starts]

    # The end

    def _stop_asked(self, reason: str) -> list[Action]:
        if self.ending.draining or self.phase is Phase.STOPPING:
            return []
        announce = Announce(f"stopping ({reason})")
        if not self._ran:
            # Nothing runs that could be finished; requests that wait for the first epoch are answered.
            return [announce, *self._end_frontend("the server stops"), *self._stop_engines(reason, 0.0)]
        if not self.frontend.alive:
            return [announce, *self._stop_engines(reason, STOP_GRACE_SECONDS)]
        return [announce, EndFrontend(self.ending.drain(self._now, self._limits.drain))]

    def _give_up(self, cause: str) -> list[Action]:
        """What another start cannot cure: everything ends, with the cause named."""
        self.ending.cause = cause
        return [Announce(f"failed: {cause}", failure=True), *self._end_frontend(cause), *self._stop_engines(cause, 0.0)]

    def _end_frontend(self, reason: str) -> list[Action]:
        """Every open request is to be answered: no epoch follows."""
        last = EpochEnded(epoch=self.epoch.number, reason=reason, final=True)
        return [TellFrontend(last), EndFrontend(FRONTEND_KILL_SECONDS)] if self.frontend.alive else []

    def _stop_engines(self, reason: str, grace: float) -> list[Action]:
        """`grace` is for engines that run an epoch; the others have nothing to finish."""
        stop = Stop(reason=reason, grace=grace if self.ending.stop(self._now, self.phase is Phase.RUNNING) else 0.0)
        self._enter(Phase.STOPPING)
        return [*(Send(number, stop) for number in self._members()), *self._over()]

    def _while_stopping(self, rank: Rank, message: ToCoordinator) -> list[Action]:
        if not isinstance(message, Report):
            return []
        self.ending.last_words(evidence := from_report(rank.number, message))
        return [Announce(f"while stopping: {evidence}", failure=True)]

    def _members(self) -> list[int]:
        return [rank.number for rank in self.ranks if rank.state is not State.ABSENT]

    def _over(self) -> list[Action]:
        return [] if self._members() or self.frontend.alive else [self.ending.finish()]

    def _stopped_late(self) -> list[Action]:
        members = self._members()
        return [self.ending.give_up([*([named(members)] if members else []), *(["the frontend"] if self.frontend.alive else [])])]
