"""Whether the ranks of a running epoch still move, judged from their progress pages. Pure: time comes in with every call.

A rank's page says how far it is; its supervisor sends it four times a second. What the coordinator was itself late is taken from
every age (`Lateness`): on a host that stands still for a while nobody is blamed for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ep_runtime.supervise.evidence import DEADLINE, Evidence
from ep_runtime.supervise.ranks import named
from protocol.messages import Progress
from protocol.progress import Phase

PHASE_ORDER = (
    Phase.UNKNOWN,
    Phase.STARTING,
    Phase.STANDBY,
    Phase.LOADING,
    Phase.IDLE,
    Phase.CONNECTING,
    Phase.PREPARING,
    Phase.VOTING,
    Phase.EXECUTING,
    Phase.ACKNOWLEDGING,
    Phase.READING,
    Phase.WAITING,
    Phase.LEAVING,
)
"""How far a rank is within one step: a rank that waits has done its step and has no next one yet."""


class Lateness:
    """How late the coordinator's own timer fires, in all. From the moment that a tick is due until it fires, time stands still."""

    def __init__(self, now: float) -> None:
        self._due = now
        self._total = 0.0

    def at(self, now: float) -> float:
        """Seconds of lateness up to `now` (monotonic)."""
        if now > self._due:
            self._total += now - self._due
            self._due = now
        return self._total

    def tick(self, now: float, interval: float) -> None:
        """A tick fires; the next one is due `interval` seconds later."""
        self.at(now)
        self._due = now + interval


@dataclass(slots=True)
class Seen:
    """What is known of one rank. Times are the coordinator's: of its last sign of life, last move, and last change of command."""

    heard: float
    moved: float
    command: float
    progress: Progress | None = None

    @property
    def place(self) -> tuple[int, int, int]:
        """Order among ranks: step, phase within it, collectives; before everything when nothing was seen."""
        if self.progress is None:
            return (-1, 0, 0)
        return (self.progress.step, PHASE_ORDER.index(_phase(self.progress)), self.progress.collectives)


class Watch:
    """What the ranks of the current epoch have shown."""

    def __init__(self, world: int) -> None:
        self._epoch = 0
        self._seen = [Seen(0.0, 0.0, 0.0) for _ in range(world)]

    def begin(self, epoch: int, now: float) -> None:
        """Every rank has until now moved in time; where it is in another epoch is forgotten."""
        if epoch != self._epoch:
            self._seen = [Seen(now, now, now) for _ in self._seen]
        self._epoch = epoch
        for seen in self._seen:
            seen.heard = seen.moved = seen.command = now

    def heard(self, rank: int, now: float) -> None:
        """A sign of life of a rank's supervisor."""
        self._seen[rank].heard = now

    def note(self, rank: int, progress: Progress, now: float) -> None:
        """A page was read. One that stands in another epoch says nothing of this one."""
        if progress.epoch != self._epoch:
            return
        seen, last = self._seen[rank], self._seen[rank].progress
        if last is None or progress.moves != last.moves:
            seen.moved = now
        if last is None or (progress.step, progress.command) != (last.step, last.command):
            seen.command = now
        seen.progress = progress

    def silent(self, now: float, bound: float) -> list[int]:
        """Ranks whose supervisors have said nothing for longer than `bound` seconds."""
        return [rank for rank, seen in enumerate(self._seen) if now - seen.heard > bound]

    def judge(self, bound: float) -> Evidence | None:
        """Evidence when a rank is known not to have moved for longer than `bound` seconds, or the head's command takes longer.

        What a page shows is known up to the last sign of life only: a silent supervisor is another failure.
        """
        still = [rank for rank, seen in enumerate(self._seen) if seen.heard - seen.moved > bound]
        if still:
            return Evidence(None, DEADLINE, f"{named(still)} did not move for {bound:g} s; {self.describe()}")
        head = self._seen[0]
        if _in_command(head.progress) and head.heard - head.command > bound:
            return Evidence(None, DEADLINE, f"the head's command takes longer than {bound:g} s; {self.describe()}")
        return None

    def behind(self) -> list[int]:
        """Ranks that are the least far; the head when all wait for its next command; none when all are equally far in one."""
        places = [seen.place for seen in self._seen]
        ranks = [rank for rank, place in enumerate(places) if place == min(places)]
        if len(ranks) < len(places) or len(places) == 1:
            return ranks
        return [0] if self._seen[0].progress is not None and not _in_command(self._seen[0].progress) else []

    def describe(self) -> str:
        """Where every rank is, and which is behind."""
        behind = self.behind()
        verdict = f"behind: {named(behind)}" if behind else "all are equally far"
        return "; ".join([verdict, *(_where(rank, seen) for rank, seen in enumerate(self._seen))])


def _where(rank: int, seen: Seen) -> str:
    at = seen.progress
    if at is None:
        return f"rank {rank}: no progress seen"
    command = f" {at.command}" if at.command else ""
    return f"rank {rank}: step {at.step}{command}, {at.phase.lower()}, {at.collectives} collectives, still for {at.idle_s:.1f} s"


def _phase(progress: Progress) -> Phase:
    name = progress.phase.upper()
    return Phase[name] if name in Phase.__members__ else Phase.UNKNOWN


def _in_command(progress: Progress | None) -> bool:
    return progress is not None and PHASE_ORDER.index(Phase.PREPARING) <= PHASE_ORDER.index(_phase(progress)) < PHASE_ORDER.index(
        Phase.WAITING
    )
