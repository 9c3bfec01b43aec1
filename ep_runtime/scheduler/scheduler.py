"""The scheduler as the head loop uses it: requests in, plans out, results in, updates out.

Plans depend on the history of calls alone. Any number of plans may be launched before the first one's results are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

from ep_runtime.scheduler.admission import loops_refusal, queue_full, refusal, runs_alone, skipped_images
from ep_runtime.scheduler.core import (
    NextImage,
    Plan,
    SchedulerError,
    SchedulerLimits,
    SchedulerStats,
    SeqState,
    Sequence,
    SpanResult,
    StepRecord,
    StepResult,
)
from ep_runtime.scheduler.lifecycle import Lifecycle
from ep_runtime.scheduler.planner import Planner
from ep_runtime.scheduler.results import (
    finish_reason,
    make_sequence,
    refused,
    sampled_depth,
    take_cached,
    terminal,
    unreported,
)
from protocol.commands import Span
from protocol.messages import FinishReason, SequenceUpdate, Submit


class Scheduler:
    """Continuous batching over slots and blocks, with preemption by recompute. Calls come from one thread."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._life = Lifecycle(limits)
        self._planner = Planner(limits, self._life)
        self._live: dict[str, Sequence] = {}
        self._made: StepRecord | None = None
        self._launched: deque[StepRecord] = deque()
        self._updates: list[SequenceUpdate] = []
        self._arrivals = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._cached_tokens = 0

    # Requests

    def submit(self, message: Submit) -> SequenceUpdate | None:
        """Queue a request (None), or its only update: 400 when it can never run, 429 when the queue is full.

        A request with `generated` tokens or suspicions was taken in an earlier epoch and is never refused for the queue's sake;
        one whose generated tokens are already complete is answered at once. SchedulerError when the id is alive.
        """
        if message.request_id in self._live:
            raise SchedulerError(f"request id {message.request_id!r} is alive")
        image_rows = sum(image.rows for image in message.images)
        reason = refusal(len(message.prompt), message.sampling.max_tokens, self.limits, image_rows)
        if reason is None:
            reason = loops_refusal(message, self.limits)
        if reason is not None:
            return refused(message.request_id, reason, 400)
        if not (message.generated or message.suspicions) and queue_full(len(self._live), self.limits):
            return refused(
                message.request_id,
                f"{len(self._live)} requests run or wait; at most {self.limits.max_slots} run and {self.limits.max_queue} wait",
                429,
                self.limits.retry_after,
            )
        seq = make_sequence(message, self._arrivals, self.limits.eos_token_ids)
        self._arrivals += 1
        finish = finish_reason(seq) if message.generated else None
        if finish is not None:
            stop_token = seq.tokens[-1] if finish == "stop" else None
            return SequenceUpdate(seq.request_id, [], finish=finish, stop_token=stop_token)
        self._live[seq.request_id] = seq
        self._life.wait(seq)
        return None

    def allow(self, request_id: str, index: int) -> bool:
        """The grammar's mask for generated token `index` is here: the row that samples it may be planned.

        False for a mask that is not the one after the last: it came before, or is ahead of its time.
        """
        seq = self._live.get(request_id)
        if seq is None or index != seq.mask_index + 1:
            return False
        seq.mask_index = index
        self._life.unpark(seq)
        return True

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these sequences now; unknown ids have ended already. Their updates come with `drain_updates` or `complete`."""
        for request_id in request_ids:
            seq = self._live.get(request_id)
            if seq is not None:
                seq.aborted = True
                self._end(seq, terminal(seq, "abort"))

    def reject(self, request_ids: Iterable[str], error: str, status: int = 500) -> None:
        """End these sequences with an error of their own, such as an ALLOC that was voted down. Unknown ids have ended already."""
        for request_id in request_ids:
            seq = self._live.get(request_id)
            if seq is not None:
                self._end(seq, terminal(seq, "error", error, status))

    def drain_updates(self) -> list[SequenceUpdate]:
        """Updates that arose outside `complete`, oldest first."""
        updates, self._updates = self._updates, []
        return updates

    # Steps

    def plan(self, encoded: Container[bytes] = (), *, prompts: bool = True) -> Plan | None:
        """The next step, to be `launched` or `discard`ed before another is made; None when there is nothing to do now.

        `encoded` has the digests of the images whose rows are here: a sequence starts when it has those of all its images outside
        its prefix hit. Until then those behind it wait, too, as behind any other that cannot start yet; running ones go on.
        Without `prompts` no piece of a prompt is planned, unless it is a suspect's: something else has this step's time.

        None while nothing is launched means that no sequence is alive, or that some wait for grammar masks or for images to be
        encoded, and others for room, or that it was made without `prompts`.
        """
        if self._made is not None:
            raise SchedulerError("the last plan was neither launched nor discarded")
        self._made = self._planner.make(encoded, prompts=prompts)
        return None if self._made is None else self._made.plan

    def launched(self, plan: Plan) -> None:
        """The plan's commands are sent. Results are due if it has spans."""
        record = self._take_made(plan)
        if plan.spans:
            self._launched.append(record)

    def discard(self, plan: Plan, allocated: Iterable[int] = ()) -> None:
        """The plan's forward was not sent: its rows are un-planned, its reservations return, its FREEs go out with the next plan.

        `allocated` are slots of its ALLOCs that took effect all the same; they are freed with the next plan too. Preemptions and
        evictions that it needed stay.
        """
        record = self._take_made(plan)
        life = self._life
        # Backwards, so that blocks return in the order that makes the next plan take the same ones.
        for seq, span in zip(reversed(record.sequences), reversed(plan.spans), strict=True):
            seq.in_flight -= 1
            if seq.state is not SeqState.RUNNING:
                if seq.in_flight == 0:
                    life.drained(seq)
            elif seq in record.admitted:
                life.unadmit(seq)
            else:
                life.advance(seq, -span.length)
                life.trim(seq)
        sooner, life.frees = life.frees, list(plan.frees)
        for slot in [*sooner, *allocated]:
            life.free_later(slot)

    def complete(self, result: StepResult) -> list[SequenceUpdate]:
        """Read the results of the oldest launched plan; returns these and all other updates that are due."""
        if not result.plan.spans:
            return self.drain_updates()
        if not self._launched or self._launched[0].plan is not result.plan:
            raise SchedulerError("results are read in launch order, once")
        record = self._launched.popleft()
        updates = self._updates
        self._updates = []
        running = SeqState.RUNNING
        for seq, span, got in zip(record.sequences, result.plan.spans, result.spans, strict=True):
            seq.in_flight -= 1
            if seq.state is running:
                update = self._absorb(seq, span, got)
            else:
                update = self._absorb_late(seq, span, got, record.number)
            if update is not None:
                updates.append(update)
        if len(record.sequences) == 1 and result.plan.spans[0].sampled:
            self._clear_suspicion(record.sequences[0])
        return updates

    def fail(self, plan: Plan, error: str, request_ids: Iterable[str] = ()) -> list[SequenceUpdate]:
        """A launched plan (any, not only the oldest) ran and failed alike on every rank.

        The sequences of `request_ids` end with the error. Every other one of the plan is computed again; the one that was alone in
        its plan, or fails again after it was in two failed batches and so runs alone, ends with the error.
        """
        record = next((record for record in self._launched if record.plan is plan), None)
        if record is None:
            raise SchedulerError("the failed plan is not launched")
        self._launched.remove(record)
        self.reject(request_ids, error)
        alone = len(record.sequences) == 1
        for seq in record.sequences:
            seq.in_flight -= 1
            if seq.state is SeqState.RUNNING:
                if alone:
                    text = f"The engine failed while it was running this request alone: {error}"
                    self._end(seq, terminal(seq, "error", text, 500))
                else:
                    self._recompute(seq, record.number)
            else:
                if seq.state is SeqState.DRAINING and record.number < seq.void_from:
                    seq.void_from = record.number
                    seq.failures += 1
                if seq.in_flight == 0:
                    self._life.drained(seq)
        return self.drain_updates()

    # Images

    @property
    def images_due(self) -> bool:
        """True when `next_images` may name others than before; constant cost."""
        return self._life.queue.images_due

    def next_images(self, limit_rows: int, encoded: Container[bytes] = ()) -> list[NextImage]:
        """The images of the next waiting sequences that fit into `limit_rows` rows, each contents once, `encoded` or not.

        In the order in which the sequences may start, whole sequences only: whoever keeps the rows of all these, and encodes those
        that are missing in this order, lets every sequence start in its turn. Images in a prefix hit are left out.
        """
        found: list[NextImage] = []
        seen: set[bytes] = set()
        rows = 0
        for seq in self._life.awaiting_images():
            skipped = skipped_images(seq.images, len(self._life.place(seq).hits) * self.limits.block_size)
            needed = {image.digest: index for index, image in reversed([*enumerate(seq.images)][skipped:])}
            new = sorted(index for digest, index in needed.items() if digest not in seen)
            rows += sum(seq.images[index].rows for index in new)
            if found and rows > limit_rows:
                break
            alone = runs_alone(seq.failures)
            seen.update(needed)
            found += [NextImage(request_id=seq.request_id, index=i, digest=seq.images[i].digest, alone=alone) for i in new]
        self._life.queue.images_due = any(image.digest not in encoded for image in found)
        return found

    # State

    def generated(self, request_id: str) -> list[int]:
        """A live sequence's generated tokens that the host knows, replayed ones among them."""
        seq = self._live[request_id]
        return seq.tokens[seq.prompt_len :]

    def waits(self, request_id: str) -> bool:
        """Whether this is a live sequence without a slot, which needs its images encoded before it starts."""
        seq = self._live.get(request_id)
        return seq is not None and seq.state is SeqState.WAITING

    def live(self) -> list[str]:
        """The ids of all sequences without a terminal event, in order of submission."""
        return list(self._live)

    @property
    def idle(self) -> bool:
        """True when no sequence is alive, no results are unread, and nothing is left to send or to tell."""
        return not (self._live or self._made or self._launched or self._life.frees or self._updates)

    def stats(self) -> SchedulerStats:
        """Gauges and totals, at constant cost."""
        life = self._life
        return SchedulerStats(
            running=len(life.running),
            waiting=life.waiting,
            free_blocks=sum(owner.blocks.available for owner in life.owners),
            total_blocks=sum(owner.blocks.total for owner in life.owners),
            free_slots=sum(owner.slots.free for owner in life.owners),
            total_slots=self.limits.max_slots,
            preemptions=life.preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=self._cached_tokens,
        )

    def check_integrity(self) -> None:
        """SchedulerError on any inconsistency, within an owner or between owners."""
        self._life.check_integrity()
        records = [*self._launched, *([self._made] if self._made else [])]
        named: dict[int, int] = {}
        for record in records:
            for seq in record.sequences:
                named[seq.arrival] = named.get(seq.arrival, 0) + 1
        holders = self._life.holders()
        for seq in holders:
            if seq.in_flight != named.pop(seq.arrival, 0):
                raise SchedulerError(f"{seq.request_id} has {seq.in_flight} steps in flight by its own count alone")
            if seq.state is not SeqState.RUNNING and seq.in_flight == 0:
                raise SchedulerError(f"{seq.request_id} has nothing in flight and still drains")
        if named:
            raise SchedulerError("a step in flight names a sequence without a slot")
        alive = sum(seq.state is not SeqState.FINISHED for seq in holders) + self._life.waiting
        if alive != len(self._live) or any(seq.state is SeqState.FINISHED for seq in self._live.values()):
            raise SchedulerError(f"{len(self._live)} sequences are alive, {alive} hold a slot or wait")

    # Inner moves

    def _take_made(self, plan: Plan) -> StepRecord:
        record = self._made
        if record is None or record.plan is not plan:
            raise SchedulerError("this is not the plan that was made last")
        self._made = None
        return record

    def _absorb(self, seq: Sequence, span: Span, got: SpanResult) -> SequenceUpdate | None:
        """Take one result into its sequence. Its blocks are entered before it may end, its slot moves after."""
        committed = span.start + span.length
        if committed >= seq.next_entry:
            self._life.enter_blocks(seq, committed)
        if committed >= seq.rows_until:
            self._life.return_rows(seq)
        if not span.sampled:
            return self._absorb_prompt(seq, got, committed)
        token = got.token
        if token is None:
            raise SchedulerError(f"{seq.request_id} sampled at position {committed - 1}, its result has no token")
        tokens = seq.tokens
        tokens.append(token)
        self._generated_tokens += 1
        finish: FinishReason | None = None
        if token in seq.stops or len(tokens) >= seq.token_limit:
            finish = finish_reason(seq)
        if seq.loops is not None:
            depth = sampled_depth(seq, span, got)
            seq.depths.append(depth)
            return self._special_update(seq, got, [token], finish, [depth])
        if seq.emitted and finish is None and got.prompt_logprobs is None:
            return SequenceUpdate(seq.request_id, [token], got.logprobs)  # type: ignore[arg-type]
        return self._special_update(seq, got, [token], finish, [])

    def _absorb_prompt(self, seq: Sequence, got: SpanResult, committed: int) -> SequenceUpdate | None:
        # Only a request for no tokens at all ends on a row that samples none.
        finish: FinishReason | None = "length" if committed >= seq.token_limit else None
        if finish is None and got.prompt_logprobs is None:
            return None
        return self._special_update(seq, got, [], finish, [])

    def _absorb_late(self, seq: Sequence, span: Span, got: SpanResult, number: int) -> SequenceUpdate | None:
        """A result of a sequence that runs no more: a preempted one keeps it, unless an earlier step of it failed."""
        update = None
        if seq.state is SeqState.DRAINING and number < seq.void_from:
            update = self._absorb(seq, span, got)
        if seq.in_flight == 0:
            self._life.drained(seq)
        return update

    def _special_update(
        self, seq: Sequence, got: SpanResult, tokens: list[int], finish: FinishReason | None, depths: list[int]
    ) -> SequenceUpdate | None:
        """The first and last updates of a sequence, those with prompt logprobs, and all with depths."""
        prompt_start, prompt_logprobs = unreported(seq, got)
        if not tokens and finish is None and prompt_logprobs is None:
            return None
        if not seq.emitted:
            self._prompt_tokens += seq.prompt_len
            self._cached_tokens += seq.cached
        update = SequenceUpdate(
            seq.request_id,
            tokens,
            got.logprobs,  # type: ignore[arg-type]
            finish=finish,
            stop_token=tokens[-1] if finish == "stop" else None,
            prompt_start=prompt_start,
            prompt_logprobs=prompt_logprobs,
            cached=take_cached(seq),
            depths=depths,
        )
        if finish is not None:
            del self._live[seq.request_id]
            self._life.finish(seq)
        return update

    def _end(self, seq: Sequence, update: SequenceUpdate) -> None:
        self._updates.append(update)
        del self._live[seq.request_id]
        self._life.finish(seq)

    def _recompute(self, seq: Sequence, number: int) -> None:
        """The sequence was in a failed batch: its state on the device is void from that step on."""
        seq.void_from = number
        seq.requeued = True
        self._life.leave(seq, SeqState.DRAINING, failures=1)

    def _clear_suspicion(self, seq: Sequence) -> None:
        """It got a token alone, so it is not what failed its batches."""
        if seq.state is not SeqState.RUNNING or seq.suspected or not runs_alone(seq.failures):
            return
        self._life.running.remove(seq)
        seq.failures = 0
        self._life.running.add(seq)
