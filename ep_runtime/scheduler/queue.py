"""The waiting queue: priority (lower first), then arrival."""

from __future__ import annotations

import heapq

from ep_runtime.scheduler.core import SchedulerError, SeqState, Sequence


class WaitingQueue:
    """A heap of keys over the waiting sequences. Removed ones leave their key behind, which is skipped when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._waiting: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, seq: Sequence) -> None:
        """Queue a WAITING sequence at its own place: a preempted one comes back before those that arrived later."""
        if seq.arrival in self._waiting:
            raise SchedulerError(f"{seq.request_id} is queued twice")
        self._waiting[seq.arrival] = seq
        heapq.heappush(self._heap, seq.key)

    def peek(self) -> Sequence | None:
        """The next one, or None."""
        heap, waiting = self._heap, self._waiting
        while heap:
            seq = waiting.get(heap[0][1])
            if seq is not None:
                return seq
            heapq.heappop(heap)
        return None

    def remove(self, seq: Sequence) -> None:
        """Take one out, from any place; the cost is constant, amortised."""
        if self._waiting.pop(seq.arrival, None) is not seq:
            raise SchedulerError(f"{seq.request_id} is not queued")
        if self._heap and self._heap[0] == seq.key:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = sorted(waiting.key for waiting in self._waiting.values())

    def check_integrity(self) -> None:
        """SchedulerError unless every queued sequence is WAITING, holds nothing and has exactly one key in the heap."""
        for seq in self._waiting.values():
            if seq.state is not SeqState.WAITING or seq.slot is not None or seq.blocks or seq.in_flight or seq.planned:
                raise SchedulerError(f"{seq.request_id} is queued but {seq.state.name} with slot {seq.slot}")
        if sorted(key for key in self._heap if key[1] in self._waiting) != sorted(seq.key for seq in self._waiting.values()):
            raise SchedulerError("the heap's keys are not the waiting sequences'")
