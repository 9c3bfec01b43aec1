"""What must hold of every action of the membership, from what was delivered before it, without looking into the machine."""

from __future__ import annotations

from typing import Any

from ep_runtime.supervise import events
from ep_runtime.supervise.events import Limits
from protocol.messages import (
    BeginEpoch,
    EndEpoch,
    EpochEnded,
    EpochLeft,
    KillEngine,
    Loaded,
    OpenEpoch,
    Ready,
    Recovered,
    Report,
    Stop,
)


class Judge:
    """Follows one world; every check is an assertion."""

    def __init__(self, world: int, limits: Limits) -> None:
        self.limits = limits
        self.epoch = 0
        self.idle = dict.fromkeys(range(world), False)
        self.in_epoch = dict.fromkeys(range(world), False)
        self.killed: set[int] = set()
        self.to_leave: set[int] = set()
        self.begun = self.outside = False
        self.alone = ""
        self.told: list[EpochEnded] = []
        self.over: list[float] = []
        self.failed = dict.fromkeys(range(world), 0)
        self.was_ready: set[int] = set()
        self.stopped = False
        self.recovered = 0

    def event(self, event: events.Event, now: float) -> None:
        match event:
            case events.Joined(rank):
                self.idle[rank] = False
            case events.Left(rank):
                self.outside = self.outside or self.in_epoch[rank]
                self._gone(rank)
            case events.Received(rank, message):
                self._message(rank, message)

    def _message(self, rank: int, message: Any) -> None:
        match message:
            case Loaded():
                self.idle[rank] = True
                self.in_epoch[rank] = self.in_epoch[rank] and not self.told
            case EpochLeft(epoch) if epoch == self.epoch and self.in_epoch[rank]:
                self.alone = self.alone or message.alone
                if rank not in self.killed:
                    self.idle[rank], self.in_epoch[rank] = True, False
            case Ready():
                self.failed[rank] = 0
                self.was_ready.add(rank)
            case Report():
                if message.epoch == self.epoch:
                    self.alone = self.alone or message.alone
                if message.ended:
                    self.outside = self.outside or (message.outside and self.in_epoch[rank] and rank not in self.killed)
                    if rank in self.was_ready:
                        self.was_ready.discard(rank)
                    else:
                        self.failed[rank] += 1
                    self._gone(rank)

    def _gone(self, rank: int) -> None:
        self.idle[rank] = self.in_epoch[rank] = False
        self.killed.discard(rank)

    def action(self, action: events.Action, now: float) -> None:
        match action:
            case events.Send(_, OpenEpoch(epoch)):
                assert not self.stopped
                assert all(self.idle.values()), f"epoch {epoch} is opened while {self.idle}"
                assert epoch == self.epoch + 1
                assert self.epoch == 0 or len(self.told) == 2, "an epoch follows one whose end was not told twice"
                assert max(self.failed.values()) < self.limits.failed_starts
                assert sum(now - time < 3600 for time in self.over) <= self.limits.recoveries
                self.epoch, self.told, self.begun, self.outside, self.alone = epoch, [], False, False, ""
                self.in_epoch = dict.fromkeys(self.in_epoch, True)
                self.idle[0] = False
            case events.Send(rank, BeginEpoch(epoch)):
                assert epoch == self.epoch
                assert self.in_epoch[rank]
                assert not self.told
                self.begun, self.idle[rank] = True, False
            case events.Send(rank, EndEpoch(epoch)):
                assert epoch == self.epoch
                assert len(self.told) == 1
                self.idle[rank] = self.idle[rank] and rank not in self.to_leave
                self.to_leave.discard(rank)
            case events.Send(rank, KillEngine()):
                self.killed.add(rank)
                self.idle[rank] = False
            case events.Send(_, Stop()):
                self.stopped = True
            case events.TellFrontend(EpochEnded() as ended):
                self._ended(ended, now)
            case events.TellFrontend(Recovered(epoch)):
                assert epoch == self.epoch
                assert not self.told
                assert self.recovered < epoch
                self.recovered = epoch

    def _ended(self, ended: EpochEnded, now: float) -> None:
        if ended.final:
            self._given_up(ended.reason, now)
            return
        assert ended.epoch == self.epoch
        self.told.append(ended)
        assert len(self.told) <= 2
        if len(self.told) == 1:
            assert (ended.suspicious, ended.alone) == (False, "")
            self.to_leave = {rank for rank, there in self.in_epoch.items() if there}
            return
        assert not self.to_leave, "not everybody was told to leave"
        assert not any(self.in_epoch.values()), "the cause was decided before all had answered"
        self.over.append(now)
        suspicious = self.begun and not self.outside
        assert (ended.suspicious, ended.alone) == (suspicious, self.alone if suspicious else ""), self.outside

    def _given_up(self, reason: str, now: float) -> None:
        if "starts in a row" in reason and "frontend" not in reason:
            rank, count = (int(word.rstrip(":")) for word in reason.split()[1:3])
            assert count == self.failed[rank] == self.limits.failed_starts, reason
        if "within an hour" in reason:
            assert sum(now - time < 3600 for time in self.over) == self.limits.recoveries + 1
