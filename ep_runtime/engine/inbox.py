"""What the frontend tells the head: requests, the end of some, and grammar masks; each is taken, or answered at once."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from ep_runtime.engine.port import FrontendLost, Received, Undecodable
from ep_runtime.engine.sampling.checks import mask_fault, submission_fault
from ep_runtime.engine.vision.checks import images_fault
from ep_runtime.scheduler.results import refused
from protocol.messages import Abort, Mask, Submit, Takeover

if TYPE_CHECKING:
    from ep_runtime.engine.busy import BusyTime
    from ep_runtime.engine.intake import Intake
    from ep_runtime.engine.outbox import Outbox
    from ep_runtime.engine.port import Port
    from ep_runtime.engine.requests import RequestTable
    from ep_runtime.scheduler.scheduler import Scheduler
    from model.spec import VisionSpec

log = logging.getLogger(__name__)


class Inbox:
    """Reads the port, and fills the intake, the scheduler and the table of live requests.

    It knows which frontend the requests may be of, and whether new ones are taken at all: `closed` says that they are not.
    """

    def __init__(
        self,
        port: Port,
        scheduler: Scheduler,
        requests: RequestTable,
        intake: Intake,
        outbox: Outbox,
        busy: BusyTime,
        *,
        vocab_size: int,
        vision: VisionSpec | None,
        mask_deadline_s: float,
    ) -> None:
        self.closed = False
        self.mask_deadline_s = mask_deadline_s
        self._port = port
        self._scheduler = scheduler
        self._requests = requests
        self._intake = intake
        self._outbox = outbox
        self._busy = busy
        self._vocab_size = vocab_size
        self._vision = vision
        self._owner = ""

    def receive(self, wait_s: float) -> None:
        """Act on what has arrived; waits up to `wait_s` seconds for the first. New requests go to the intake."""
        began = time.monotonic()
        messages = self._port.receive(wait_s)
        if wait_s > 0:
            self._busy.waited(began)
        for message in messages:
            self._accept(message)
        self._outbox.drain()

    def take_in(self, rows: int | None) -> None:
        """Of the requests that have come, as many as `Intake.take` gives for one turn."""
        for message in self._intake.take(rows):
            self._submit(message)

    def reject_late_masks(self) -> None:
        """A row waits for its own mask alone, and not for ever."""
        now = time.monotonic()
        if self._port.congested:
            # What asks for the masks waits here.
            self._requests.restart_clocks(now)
        for request_id in self._requests.late_masks(now - self.mask_deadline_s):
            text = f"the grammar's mask for the next token did not come within {self.mask_deadline_s:g} s"
            self._scheduler.reject([request_id], text)

    def _accept(self, message: Received) -> None:
        due = self._intake.due_before(message)
        for submit in due:
            self._submit(submit)
        match message:
            case Submit():
                self._intake.add(message)
            case Abort():
                self._scheduler.abort(message.request_ids)
            case Mask():
                fault = mask_fault(message.mask)
                if fault is not None:
                    self._scheduler.reject([message.request_id], fault)
                elif self._scheduler.allow(message.request_id, message.index):
                    self._requests.set_mask(message, time.monotonic())
            case Undecodable():
                answered = due and message.request_id not in self._requests
                if not answered:
                    self._refuse(message)
            case FrontendLost():
                left = self._requests.ids()
                # It ends first when the server does, and then has left nothing.
                log.log(logging.WARNING if left else logging.INFO, "the frontend is gone; its %d requests are aborted", len(left))
                self._scheduler.abort(left)
            case Takeover():
                self._owner = message.prefix
                self._scheduler.abort([name for name in self._requests.ids() if not name.startswith(self._owner)])

    def _refuse(self, message: Undecodable) -> None:
        """Answer the request that a broken message names. A second submission does not end the first, and nothing revives."""
        if message.request_id not in self._requests:
            if message.kind != "Mask":
                self._outbox.publish([refused(message.request_id, message.fault, 400)])
        elif message.kind != "Submit":
            self._scheduler.reject([message.request_id], message.fault, 400)

    def _submit(self, message: Submit) -> None:
        """Take a request or answer it at once. An id names one request until its terminal event has gone out."""
        request_id = message.request_id
        if request_id in self._requests:
            self._outbox.drain()
        if request_id in self._requests:
            # An answer to the second one would end the first.
            log.error("request id %r is alive; a second request by that name is refused", request_id)
            return
        answer = None
        if self.closed:
            answer = refused(request_id, "the engine is ending", 503)
        elif not request_id.startswith(self._owner):
            # What a frontend had sent before it died may arrive behind its successor's first word.
            answer = refused(request_id, "its frontend is gone", 503)
        elif (fault := self._fault(message)) is not None:
            answer = refused(request_id, fault, 400)
        else:
            answer = self._scheduler.submit(message)
        if answer is None:
            self._requests.add(message)
        else:
            self._outbox.publish([answer])

    def _fault(self, message: Submit) -> str | None:
        return submission_fault(message, self._vocab_size) or images_fault(message, self._vision)
