"""What the next step does: decode rows first, then pieces of running prompts, then new prompts."""

from __future__ import annotations

from collections.abc import Container

from ep_runtime.scheduler.admission import blocks_for, piece_end, skipped_images
from ep_runtime.scheduler.core import NEVER, Plan, SchedulerLimits, Sequence, SlotAlloc, StepRecord
from ep_runtime.scheduler.lifecycle import Lifecycle
from protocol.commands import Span, Wanted


class Draft:
    """A plan in the making; `room` is what is left of the token budget, `score_room` of the rows that may be scored.

    `encoded` has the digests of the images whose rows are here.
    """

    __slots__ = ("admitted", "allocs", "encoded", "indices", "room", "score_room", "sequences", "spans", "tokens")

    def __init__(self, room: int, score_room: int, encoded: Container[bytes]) -> None:
        self.room = room
        self.score_room = score_room
        self.encoded = encoded
        self.spans: list[Span] = []
        self.sequences: list[Sequence] = []
        self.indices: list[int] = []
        self.tokens: list[int] = []
        self.allocs: list[SlotAlloc] = []
        self.admitted: list[Sequence] = []


class Planner:
    """Makes plans from the books of a `Lifecycle`, reserving there what a plan uses.

    `_short` is the suspect whose turn it was when one was last looked for, and that had no room to start.
    """

    def __init__(self, limits: SchedulerLimits, life: Lifecycle) -> None:
        self._limits = limits
        self._life = life
        self._numbers = 0
        self._was_solo = False
        self._short: Sequence | None = None

    def make(self, encoded: Container[bytes], *, prompts: bool = True) -> StepRecord | None:
        """The next step, or None when no slot moves and no row is due. Without `prompts` only suspects get prompt rows."""
        draft = Draft(self._limits.max_batch_tokens, self._limits.max_scored_rows, encoded)
        solo = False
        if self._was_solo or not (solo := self._plan_solo(draft)):
            self._plan_batch(draft, prompts)
            solo = not draft.spans and self._was_solo and self._plan_solo(draft)
        self._was_solo = solo
        # Last, because planning preempts: the victims' FREEs go out at once.
        frees, self._life.frees = tuple(self._life.frees), []
        if not draft.spans and not frees:
            return None
        self._numbers += 1
        plan = Plan(
            frees=frees,
            allocs=tuple(draft.allocs),
            spans=tuple(draft.spans),
            tokens=tuple(draft.tokens),
            owners=tuple([seq.request_id for seq in draft.sequences]),
            indices=tuple(draft.indices),
            alone=solo,
        )
        return StepRecord(number=self._numbers, plan=plan, sequences=tuple(draft.sequences), admitted=tuple(draft.admitted))

    def _plan_batch(self, draft: Draft, prompts: bool) -> None:
        preempted = self._life.preemptions
        self._plan_decodes(draft, self._life.running.decoding)
        if prompts and self._plan_prompts(draft) and preempted == self._life.preemptions:
            while self._admit_next(draft, alone=False):
                pass

    def _plan_solo(self, draft: Draft) -> bool:
        """A plan for one suspect alone, in turn with plans for all others. False when none has work.

        The next suspect starts when no other runs, except such as wait for a grammar's mask.
        """
        self._short = None
        for seq in self._life.running.solo[:]:
            if seq.planned < seq.prefill_len:
                return self._plan_piece(draft, seq)
            if not seq.lacks_mask:
                self._plan_decodes(draft, [seq])
                return bool(draft.spans)
        return self._admit_next(draft, alone=True)

    def _plan_decodes(self, draft: Draft, decoding: list[Sequence]) -> None:
        """One fed row each, except for those that lack a grammar's mask.

        The list loses preempted sequences while it is walked: only from behind the current one.
        """
        add_span, add_sequence, add_index = draft.spans.append, draft.sequences.append, draft.indices.append
        last = Wanted.LAST
        for seq in decoding:
            start = seq.planned
            index = start + 1 - seq.prompt_len
            if start >= seq.row_limit or index > seq.mask_index:
                continue
            new_blocks = []
            if start >= seq.capacity:
                block = self._life.grow(seq)
                if block is None:
                    continue
                new_blocks.append(block)
            add_span(Span(seq.slot, start, 1, True, True, last, new_blocks))  # type: ignore[arg-type]
            add_sequence(seq)
            add_index(index)
            seq.planned = start + 1
            seq.in_flight += 1
            draft.room -= 1
            if draft.room == 0:
                break

    def _plan_prompts(self, draft: Draft) -> bool:
        """A piece for each running prompt, first come first served. False when one got none: then nobody overtakes it."""
        # A copy, because a prompt that is planned to its end leaves the list.
        return all(self._plan_piece(draft, seq) for seq in self._life.running.prefilling[:])

    def _admit_next(self, draft: Draft, *, alone: bool) -> bool:
        """Start the first waiting sequence with its first piece. False when it cannot start now: then nobody overtakes it.

        That holds for one whose images are still to be encoded, too: those behind it wait, and only what runs goes on. A suspect
        is waited for when it lacks room alone: smaller ones that came later would take it for ever.
        """
        life = self._life
        seq = life.queue.peek(alone=alone)
        if seq is None or draft.room == 0 or not life.slot_free:
            return False
        if self._short is not None and self._short.key < seq.key:
            return False
        if life.overtakes(seq) or life.sibling_computes(seq):
            return False
        place = life.place(seq)
        start = len(place.hits) * self._limits.block_size
        if self._piece_end(start, len(seq.tokens), seq, draft) == start:
            return False
        if not all(image.digest in draft.encoded for image in seq.images[skipped_images(seq.images, start) :]):
            life.queue.images_due = True
            return False
        alloc = life.admit(seq, place)
        if alloc is None:
            self._short = seq if alone else self._short
            return False
        draft.allocs.append(alloc)
        draft.admitted.append(seq)
        return self._plan_piece(draft, seq)

    def _plan_piece(self, draft: Draft, seq: Sequence) -> bool:
        start, total = seq.planned, seq.prefill_len
        end = self._piece_end(start, total, seq, draft)
        if end == start:
            return False
        size = self._limits.block_size
        sampled = end == total and seq.token_limit > total
        # Row r scores position r + 1; a recomputed piece may score none that is still asked for.
        scores = seq.logprobs_from <= end and start + 1 < seq.prompt_len
        wanted = Wanted.ALL if scores else Wanted.LAST if sampled else Wanted.NONE
        new_blocks = seq.blocks[blocks_for(start, size) : blocks_for(end, size)]
        depth = seq.replayed_depth(start)
        draft.spans.append(Span(seq.slot, start, end - start, False, sampled, wanted, new_blocks, depth))  # type: ignore[arg-type]
        draft.sequences.append(seq)
        draft.indices.append(max(0, end - seq.prompt_len))
        draft.tokens += seq.tokens[start:end]
        draft.room -= end - start
        if scores:
            draft.score_room -= end - start
        seq.in_flight += 1
        self._life.advance(seq, end - start)
        return True

    def _piece_end(self, start: int, total: int, seq: Sequence, draft: Draft) -> int:
        room = draft.room
        if seq.logprobs_from < NEVER and not self._limits.single_chunk:
            room = min(room, draft.score_room)
        return piece_end(start, total, room, seq.prompt_len, self._limits, looped=seq.loops is not None)
