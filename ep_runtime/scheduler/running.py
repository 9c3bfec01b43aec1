"""The running sequences, by what they need next, each list in scheduling order."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from ep_runtime.scheduler.admission import runs_alone
from ep_runtime.scheduler.core import SchedulerError, SeqState, Sequence

_key = attrgetter("key")


def _last(members: list[Sequence], owner: int) -> Sequence | None:
    return next((seq for seq in reversed(members) if seq.owner == owner), None)


class RunningSet:
    """`decoding`: every known token is planned. `prefilling`: the others. `solo`: suspects of failed batches."""

    def __init__(self) -> None:
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.solo: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.solo)

    def list_of(self, seq: Sequence) -> list[Sequence]:
        """The list that the sequence belongs to now."""
        if runs_alone(seq.failures):
            return self.solo
        return self.decoding if seq.planned >= seq.prefill_len else self.prefilling

    def add(self, seq: Sequence) -> None:
        """Insert in scheduling order."""
        insort(self.list_of(seq), seq, key=_key)

    def remove(self, seq: Sequence) -> None:
        """Take one out; what decides its list has not changed since it was added."""
        members = self.list_of(seq)
        index = bisect_left(members, seq.key, key=_key)
        if index == len(members) or members[index] is not seq:
            raise SchedulerError(f"{seq.request_id} is not in its running list")
        del members[index]

    def last(self, owner: int) -> Sequence:
        """The lowest priority, latest arrival of an owner's sequences, of which there are some."""
        ends = (_last(members, owner) for members in (self.decoding, self.prefilling, self.solo))
        return max((seq for seq in ends if seq is not None), key=_key)

    def check_integrity(self) -> None:
        """SchedulerError unless each sequence is RUNNING, in its list, in order."""
        for members in (self.decoding, self.prefilling, self.solo):
            keys = [seq.key for seq in members]
            if keys != sorted(keys):
                raise SchedulerError(f"running list out of order: {keys}")
            for seq in members:
                if seq.state is not SeqState.RUNNING or self.list_of(seq) is not members:
                    raise SchedulerError(f"{seq.request_id} ({seq.state.name}) is in the wrong running list")
