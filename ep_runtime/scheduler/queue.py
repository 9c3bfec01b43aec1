"""The waiting queue: priority (lower first), then arrival. Suspects have a lane of their own, so that nobody waits for them."""

from __future__ import annotations

import heapq

from ep_runtime.scheduler.admission import runs_alone
from ep_runtime.scheduler.core import SchedulerError, SeqState, Sequence


class WaitingQueue:
    """A heap of keys a lane. Removed sequences leave their key behind, which is skipped when it surfaces.

    What decides the lane, a sequence's count of failures, does not change while it waits. `images_due`: sequences with images have
    come or gone, so other images may have to be encoded next.
    """

    def __init__(self) -> None:
        self._lanes: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        self._waiting: dict[int, Sequence] = {}
        self._illustrated: dict[int, Sequence] = {}
        self.images_due = False

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, seq: Sequence) -> None:
        """Queue a WAITING sequence at its own place: a preempted one comes back before those that arrived later."""
        if seq.arrival in self._waiting:
            raise SchedulerError(f"{seq.request_id} is queued twice")
        self._waiting[seq.arrival] = seq
        heapq.heappush(self._lanes[runs_alone(seq.failures)], seq.key)
        if seq.images:
            self._illustrated[seq.arrival] = seq
            self.images_due = True

    def illustrated(self) -> list[Sequence]:
        """The sequences with images, in scheduling order."""
        return sorted(self._illustrated.values(), key=lambda seq: seq.key)

    def peek(self, *, alone: bool) -> Sequence | None:
        """The next one of those that run alone, or of the others; None when there is none."""
        heap, waiting = self._lanes[alone], self._waiting
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
        if seq.images:
            del self._illustrated[seq.arrival]
            self.images_due = True
        alone = runs_alone(seq.failures)
        heap = self._lanes[alone]
        if heap and heap[0] == seq.key:
            heapq.heappop(heap)
        elif len(heap) > 2 * len(self._waiting) + 16:
            heap[:] = sorted(one.key for one in self._waiting.values() if runs_alone(one.failures) == alone)

    def check_integrity(self) -> None:
        """SchedulerError unless every queued sequence is WAITING, holds nothing and has exactly one key in the heap."""
        for seq in self._waiting.values():
            held = seq.slot is not None or seq.blocks or seq.in_flight or seq.planned or seq.image_rows
            if seq.state is not SeqState.WAITING or held:
                raise SchedulerError(f"{seq.request_id} is queued but {seq.state.name} with slot {seq.slot}")
        for alone, heap in self._lanes.items():
            if any(runs_alone(self._waiting[key[1]].failures) != alone for key in heap if key[1] in self._waiting):
                raise SchedulerError("a sequence waits in the wrong lane")
        if self._illustrated != {arrival: seq for arrival, seq in self._waiting.items() if seq.images}:
            raise SchedulerError("the queue's sequences with images are not those that wait")
        keys = [key for heap in self._lanes.values() for key in heap]
        if sorted(key for key in keys if key[1] in self._waiting) != sorted(seq.key for seq in self._waiting.values()):
            raise SchedulerError("the lanes' keys are not the waiting sequences'")
