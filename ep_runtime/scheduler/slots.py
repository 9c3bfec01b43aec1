"""The owner of slot numbers."""

from __future__ import annotations

import heapq
from enum import IntEnum

from ep_runtime.scheduler.core import SchedulerError


class SlotState(IntEnum):
    """EMPTY may be allocated; DRAINING has lost its sequence, and results of a step that names it are unread."""

    EMPTY = 0
    ACTIVE = 1
    DRAINING = 2


class SlotPool:
    """Of the slot numbers `0 .. max_slots - 1`, those of one of several owners: number s is of owner `s % owners`.

    The lowest EMPTY one is taken first.
    """

    def __init__(self, max_slots: int, owner: int = 0, owners: int = 1) -> None:
        self._states = dict.fromkeys(range(owner, max_slots, owners), SlotState.EMPTY)
        self._empty = list(self._states)

    @property
    def total(self) -> int:
        """All slots."""
        return len(self._states)

    @property
    def free(self) -> int:
        """EMPTY slots."""
        return len(self._empty)

    def state(self, slot: int) -> SlotState:
        """The state of one slot."""
        return self._states[slot]

    def take(self) -> int:
        """EMPTY -> ACTIVE; the caller has seen `free > 0`."""
        if not self._empty:
            raise SchedulerError("no slot is EMPTY")
        slot = heapq.heappop(self._empty)
        self._states[slot] = SlotState.ACTIVE
        return slot

    def drain(self, slot: int) -> None:
        """ACTIVE -> DRAINING."""
        self._move(slot, SlotState.ACTIVE, SlotState.DRAINING)

    def release(self, slot: int) -> None:
        """DRAINING -> EMPTY: no step that names the slot has unread results."""
        self._move(slot, SlotState.DRAINING, SlotState.EMPTY)
        heapq.heappush(self._empty, slot)

    def untake(self, slot: int) -> None:
        """ACTIVE -> EMPTY: the plan that took the slot was not sent."""
        self._move(slot, SlotState.ACTIVE, SlotState.EMPTY)
        heapq.heappush(self._empty, slot)

    def _move(self, slot: int, before: SlotState, after: SlotState) -> None:
        if self._states[slot] is not before:
            raise SchedulerError(f"slot {slot} is {self._states[slot].name}, not {before.name}")
        self._states[slot] = after

    def check_integrity(self) -> None:
        """SchedulerError unless the free list holds exactly the EMPTY slots."""
        empty = [slot for slot, state in self._states.items() if state is SlotState.EMPTY]
        if sorted(self._empty) != empty:
            raise SchedulerError(f"free list {sorted(self._empty)} is not the EMPTY slots {empty}")
