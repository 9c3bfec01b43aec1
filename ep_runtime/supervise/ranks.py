"""What the coordinator knows of each rank, and which rank a supervisor gets that asks to take part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ep_runtime.supervise.events import Limits
from ep_runtime.supervise.limits import Starts
from protocol.messages import Join, Refused


class State(Enum):
    """Where a rank's engine is."""

    ABSENT = "absent"
    """It has no supervisor."""
    STARTING = "starting"
    """Its engine starts and loads; the supervisor starts it again when it ends."""
    IDLE = "idle"
    """It has its weights and is in no epoch."""
    BUSY = "busy"
    """It was told to open or begin the epoch."""
    LEAVING = "leaving"
    """It was told EndEpoch, and has neither answered nor ended."""


@dataclass(slots=True)
class Rank:
    """One rank. `since` is when it came into its state; `killed`: its supervisor was told to kill its engine."""

    number: int
    starts: Starts
    since: float = 0.0
    state: State = State.ABSENT
    boot: str = ""
    killed: bool = False
    words: str = ""
    """What its engine last reported of itself."""

    def become(self, state: State, now: float) -> None:
        """Enter a state."""
        self.state, self.since, self.killed = state, now, False


def in_state(ranks: Sequence[Rank], *states: State) -> list[int]:
    """Numbers of the ranks in any of these states, ascending."""
    return [rank.number for rank in ranks if rank.state in states]


def named(numbers: Sequence[int]) -> str:
    """`rank 1`, or `ranks 1, 2`."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def admit(ranks: Sequence[Rank], join: Join, local: bool) -> int | Refused:
    """The rank that a supervisor gets, or why it is refused. `local`: it is the coordinator's own, and no other may be rank 0.

    One that was here before gets its rank back, also when its old connection is not yet known to have ended. Others get the rank
    that they name, or the lowest one that has no supervisor.
    """
    world = len(ranks)
    if local:
        return 0
    for rank in ranks[1:]:
        if rank.boot == join.boot and join.boot:
            return rank.number
    free = [number for number in in_state(ranks, State.ABSENT) if number > 0]
    if join.rank is None:
        return free[0] if free else Refused(f"all {world} ranks have joined", again=True)
    if not 0 < join.rank < world:
        return Refused(f"rank {join.rank} is outside the ranks 1 to {world - 1} that may join")
    return join.rank if join.rank in free else Refused(f"rank {join.rank} has joined already", again=True)


def overdue(ranks: Sequence[Rank], state: State, now: float, seconds: float) -> list[int]:
    """Ranks that have been in a state for `seconds`; what a start has to wait for is added to it."""
    late = [rank for rank in ranks if rank.state is state and now - rank.since >= seconds]
    if state is State.STARTING:
        late = [rank for rank in late if now - rank.since >= seconds + rank.starts.pause]
    return [rank.number for rank in late]


def too_late(ranks: Sequence[Rank], now: float, limits: Limits) -> str | None:
    """Who has not joined or not loaded in time, in words; None when all have, or may still."""
    absent = overdue(ranks, State.ABSENT, now, limits.rendezvous)
    if absent:
        return f"rendezvous: nothing from {named(absent)} after {limits.rendezvous:g} s"
    starting = overdue(ranks, State.STARTING, now, limits.load)
    return f"load: nothing from {named(starting)} after {limits.load:g} s" if starting else None
