"""What the head tells the frontend: results, and without any a sign of life."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from protocol.messages import EngineStats, Results, SequenceUpdate

if TYPE_CHECKING:
    from ep_runtime.engine.broadcast import Broadcaster
    from ep_runtime.engine.busy import BusyTime
    from ep_runtime.engine.intake import Intake
    from ep_runtime.engine.port import Port
    from ep_runtime.engine.requests import RequestTable
    from ep_runtime.scheduler.scheduler import Scheduler

SIGN_OF_LIFE_S = 1.0


class Outbox:
    """Hands results to the port. A request leaves the table of the living when its terminal event goes out."""

    def __init__(
        self,
        port: Port,
        scheduler: Scheduler,
        broadcaster: Broadcaster,
        requests: RequestTable,
        intake: Intake,
        busy: BusyTime,
        *,
        epoch: int,
        announce: Callable[[], None],
    ) -> None:
        self._port = port
        self._scheduler = scheduler
        self._broadcaster = broadcaster
        self._requests = requests
        self._intake = intake
        self._busy = busy
        self._epoch = epoch
        self._announce = announce
        self._last_announce = -SIGN_OF_LIFE_S
        self._last_publish = 0.0

    def announce(self) -> None:
        """Once a second: a frontend that started later learns of this epoch from the repetition."""
        now = time.monotonic()
        if now - self._last_announce >= SIGN_OF_LIFE_S and not self._port.congested:
            self._last_announce = now
            self._announce()

    def drain(self) -> None:
        """Hand on what the scheduler has to say by itself, outside a step's results."""
        self.publish(self._scheduler.drain_updates())

    def publish(self, updates: list[SequenceUpdate]) -> None:
        """Hand on updates, at most one message a step; without any, a sign of life once a second."""
        now = time.monotonic()
        if not updates and (now - self._last_publish < SIGN_OF_LIFE_S or self._port.congested):
            return
        self._last_publish = now
        for update in updates:
            if update.finish is not None:
                self._requests.remove(update.request_id)
            elif update.tokens:
                self._requests.expect_mask(update.request_id, now)
        self._port.publish(Results(epoch=self._epoch, updates=updates, stats=self._stats()))

    def _stats(self) -> EngineStats:
        counts = self._scheduler.stats()
        return EngineStats(
            step=self._broadcaster.step,
            ranks=self._broadcaster.last_steps,
            host_seconds=self._busy.seconds,
            **counts._replace(waiting=counts.waiting + len(self._intake))._asdict(),
        )
