"""Drives the membership's state machine event by event."""

from ep_runtime.supervise.epoch_record import Phase
from ep_runtime.supervise.events import (
    Announce,
    Joined,
    Limits,
    Received,
    Send,
    TellFrontend,
    Tick,
)
from ep_runtime.supervise.evidence import ENGINE_EXITED, ENGINE_KILLED
from ep_runtime.supervise.membership import Membership
from protocol.messages import (
    EpochLeft,
    EpochOpened,
    Join,
    Loaded,
    Ready,
    Report,
)

KILLED = "its engine ended: killed by SIGKILL"


def limits(**changes) -> Limits:
    usual = {"rendezvous": 300, "load": 3600, "handshake": 60, "warm": 300, "command": 120, "drain": 15}
    return Limits(**{**usual, "failed_starts": 5, "recoveries": 200, **changes})


def opened(epoch: int) -> EpochOpened:
    return EpochOpened(epoch=epoch, store="host:1", links="unix:/x")


def join(rank: int | None, boot: str = "b") -> Join:
    return Join(token="", host="h", boot=boot, rank=rank, device="cpu", package="p")


def killed(rank: int, epoch: int = 1, **more) -> Report:
    return Report(rank=rank, epoch=epoch, error=ENGINE_KILLED, message=KILLED, ended=True, **{"outside": True, **more})


def crashed(rank: int, epoch: int = 1) -> Report:
    return Report(rank=rank, epoch=epoch, error=ENGINE_EXITED, message="its engine ended: exit status 1", ended=True)


def lost(rank: int, epoch: int = 1) -> Report:
    return Report(rank=rank, epoch=epoch, error="EpPeerGone", message="a link ended")


class Server:
    """A membership with a clock; `actions` are those of the last event."""

    def __init__(self, world: int = 2, **changes) -> None:
        self.state = Membership(world, limits(**changes))
        self.world = world
        self.time = 1000.0
        self.actions = self.state.start(self.time)

    def on(self, event, after: float = 0.0, late: float = 0.0):
        self.time += after
        self.actions = self.state.handle(event, self.time, late)
        return self.actions

    def hear(self, rank: int, message, after: float = 0.0):
        return self.on(Received(rank, message), after)

    def tick(self, after: float, late: float = 0.0):
        return self.on(Tick(), after, late)

    def of(self, kind):
        return [action for action in self.actions if isinstance(action, kind)]

    def sent(self):
        return [(send.rank, send.message) for send in self.of(Send)]

    def told(self):
        return [tell.message for tell in self.of(TellFrontend)]

    def lines(self):
        return [line.text for line in self.of(Announce)]

    def load(self):
        for rank in range(self.world):
            self.on(Joined(rank, f"boot {rank}"))
        for rank in range(self.world):
            self.hear(rank, Loaded(rank=rank))
        return self

    def form(self, epoch: int = 1):
        """From OPENING to RUNNING."""
        self.hear(0, opened(epoch))
        for rank in range(self.world):
            self.hear(rank, Ready(epoch=epoch, rank=rank))
        assert self.state.phase is Phase.RUNNING
        return self

    def run(self):
        return self.load().form()

    def leave(self, epoch: int, *ranks: int, **more):
        for rank in ranks:
            self.hear(rank, EpochLeft(epoch=epoch, rank=rank, **more))
        return self.actions
