"""What goes into the membership's state machine, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import EpochEnded, Recovered, ToCoordinator, ToSupervisor

# Events


@dataclass(frozen=True, slots=True)
class Joined:
    """A supervisor was admitted as this rank; `boot` is the nonce of its life."""

    rank: int
    boot: str


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
    """The frontend process ended; `how` is in words.

    `ready`: it had come up before. `refused`: it says itself that starting again does not help (its exit status 2).
    """

    how: str
    ready: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A signal or a message asks for an ordered end."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines are looked at."""


Event = Joined | Received | Left | FrontendEnded | StopAsked | Tick


# Actions


@dataclass(frozen=True, slots=True)
class Send:
    """Send to one rank's supervisor."""

    rank: int
    message: ToSupervisor


@dataclass(frozen=True, slots=True)
class Drop:
    """Close a rank's connection, of which nothing is to be hoped; its `Left` follows."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartFrontend:
    """Start a frontend process."""


@dataclass(frozen=True, slots=True)
class EndFrontend:
    """SIGTERM to the frontend, SIGKILL `grace` seconds later."""

    grace: float


@dataclass(frozen=True, slots=True)
class TellFrontend:
    """Send to the frontend, now or as soon as it is there."""

    message: EpochEnded | Recovered


@dataclass(frozen=True, slots=True)
class Announce:
    """A line for the operator; `failure` when something is wrong."""

    text: str
    failure: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """The server is over; `status` is the exit status of serve, `cause` why it is not 0."""

    status: int
    cause: str = ""


Action = Send | Drop | StartFrontend | EndFrontend | TellFrontend | Announce | Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Seconds for each phase, and how often what fails is tried again."""

    rendezvous: float
    load: float
    handshake: float
    warm: float
    command: float
    drain: float
    failed_starts: int
    recoveries: int
