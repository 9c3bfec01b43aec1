"""What a sequence owns in each state, and its moves between states.

    WAITING --admit--> RUNNING --leave--> DRAINING --results read--> WAITING    (preempted, or in a failed batch)
       ^                  |     --leave--> FINISHED --results read--> (gone)
       +----unadmit-------+

A WAITING sequence whose next grammar mask is not here is parked beside the queue, where it is in nobody's way.
Rows of images return earlier than the rest: with the results of the last piece that needs them.
A sequence has its slot and blocks from `admit` until no planned or launched step that names the slot has unread results.
"""

from __future__ import annotations

from ep_runtime.scheduler.admission import blocks_for, hit_limit, runs_alone, skipped_images, uncut_hits
from ep_runtime.scheduler.core import NEVER, SchedulerError, SchedulerLimits, SeqState, Sequence, SlotAlloc
from ep_runtime.scheduler.image_rows import RowBudget
from ep_runtime.scheduler.owner import Owner, Place, choose
from ep_runtime.scheduler.queue import WaitingQueue
from ep_runtime.scheduler.running import RunningSet


class Lifecycle:
    """The owners of slots, blocks and cached prefixes, the queue and the running set, moved together.

    A sequence keeps to one owner from `admit` on, until it waits again. `frees` are slots whose FREE goes out with the next plan.
    Its FREEs precede its ALLOCs, so an EMPTY slot may be taken at once.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._block_size = limits.block_size
        self.owners = [Owner(number, limits) for number in range(limits.owners)]
        self.queue = WaitingQueue()
        self.running = RunningSet()
        self.rows = RowBudget(limits.max_image_tokens)
        self.frees: list[int] = []
        self.preemptions = 0
        self._parked: dict[int, Sequence] = {}
        self._returning: list[Sequence] = []
        self._holders: list[Sequence | None] = [None] * limits.max_slots
        self._computing: dict[str, Sequence] = {}

    # WAITING

    @property
    def waiting(self) -> int:
        """Sequences without a slot: queued or parked."""
        return len(self.queue) + len(self._parked)

    def wait(self, seq: Sequence) -> None:
        """Queue a WAITING sequence, or park it."""
        if seq.lacks_mask:
            self._parked[seq.arrival] = seq
        else:
            self.queue.push(seq)

    def unpark(self, seq: Sequence) -> None:
        """The mask that it lacked is here: it queues at its own place."""
        if self._parked.pop(seq.arrival, None) is not None:
            self.queue.push(seq)

    # WAITING -> RUNNING

    @property
    def slot_free(self) -> bool:
        """Whether any owner has an EMPTY slot."""
        return any(owner.slots.free for owner in self.owners)

    def place(self, seq: Sequence) -> Place:
        """Where to admit the sequence, with the known blocks that this may share there."""
        places = [Place(owner, self._find_prefix(seq, owner)) for owner in self.owners]
        return choose(places, blocks_for(len(seq.tokens), self._block_size), self._block_size)

    def _find_prefix(self, seq: Sequence, owner: Owner) -> list[int]:
        limit = self._hit_limit(seq)
        if limit == 0:
            return []
        hits = owner.tree.match(seq, limit)
        return hits[: uncut_hits(len(hits), seq.images, self._limits)]

    def awaiting_images(self) -> list[Sequence]:
        """Waiting sequences with images, in the order in which they may start: suspects that wait for another one come last."""
        waiting = self.queue.illustrated()
        first = None if self.running.solo else self.queue.peek(alone=True)
        return sorted(waiting, key=lambda seq: runs_alone(seq.failures) and seq is not first)

    def sibling_computes(self, seq: Sequence) -> bool:
        """True while a sequence of the same request computes the prompt blocks that this one can share a little later."""
        leader = self._computing.get(seq.group)
        if leader is None or self._hit_limit(seq) == 0:
            return False
        tree = self.owners[leader.owner].tree
        return tree.digest(leader, 0) == tree.digest(seq, 0)

    def _hit_limit(self, seq: Sequence) -> int:
        """Blocks that may come from the prefix tree: none when the logits of every prompt row are wanted, or with several loops."""
        if seq.loops is not None or seq.logprobs_from < NEVER:
            return 0
        return hit_limit(len(seq.tokens), self._limits)

    def overtakes(self, seq: Sequence) -> bool:
        """True while a sequence that comes before this one drains and is about to wait again."""
        return any(earlier.key < seq.key for earlier in self._returning)

    def admit(self, seq: Sequence, place: Place) -> SlotAlloc | None:
        """Give the sequence a slot, blocks for all its known tokens and rows for its images, or None for want of any now."""
        owner, hits = place
        blocks = blocks_for(len(seq.tokens), self._block_size)
        skipped = skipped_images(seq.images, len(hits) * self._block_size)
        rows = sum(image.rows for image in seq.images[skipped:])
        if rows > self.rows.available or not owner.admits(blocks, hits):
            return None
        self.queue.remove(seq)
        for block in hits:
            owner.blocks.share(block)
        seq.owner = owner.number
        seq.slot = owner.slots.take()
        seq.blocks = hits + [owner.blocks.take() for _ in range(blocks - len(hits))]
        seq.capacity = len(seq.blocks) * self._block_size
        seq.planned = len(hits) * self._block_size
        seq.prefill_len = len(seq.tokens)
        seq.state = SeqState.RUNNING
        if not seq.requeued:
            seq.cached = seq.planned
        if rows:
            self.rows.take(rows)
            seq.image_rows = rows
            seq.rows_until = seq.images[-1].stop
        self._holders[seq.slot] = seq
        owner.running += 1
        self.running.add(seq)
        # What loops leave in a block differs from what one loop does, and with their number.
        if self._limits.prefix_cache and seq.loops is None:
            seq.next_entry = seq.planned + self._block_size
            if seq.next_entry < seq.prompt_len:
                self._computing.setdefault(seq.group, seq)
        return SlotAlloc(
            slot=seq.slot,
            request_id=seq.request_id,
            token_budget=seq.token_limit,
            prompt_length=seq.prompt_len,
            adapter=seq.adapter,
            prefix_length=seq.planned,
            prefix_blocks=tuple(hits),
            images=seq.images,
            skipped=skipped,
            loops=seq.loops,
            owner=owner.number,
        )

    def unadmit(self, seq: Sequence) -> None:
        """The plan that admitted it was not sent: everything returns, and it waits at its own place."""
        slot = self._slot(seq)
        owner = self.owners[seq.owner]
        self.running.remove(seq)
        owner.running -= 1
        self._stop_computing(seq)
        owner.slots.untake(slot)
        self._let_go(seq)
        self._wait(seq)

    # RUNNING

    def advance(self, seq: Sequence, rows: int) -> None:
        """`rows` more (or, negative, fewer) positions are planned; the sequence changes its running list when due."""
        crosses = (seq.planned < seq.prefill_len) != (seq.planned + rows < seq.prefill_len)
        if crosses:
            self.running.remove(seq)
        seq.planned += rows
        if crosses:
            self.running.add(seq)

    def grow(self, seq: Sequence) -> int | None:
        """One more block, preempting later sequences of its owner for it; None when the sequence must skip this step.

        It skips while blocks are on their way back, and when it is the owner's last itself. An owner's first sequence in scheduling
        order is never preempted and never the last of several, so it always gets its block once what drains has drained.
        """
        owner = self.owners[seq.owner]
        while owner.blocks.available == 0:
            victim = self.running.last(seq.owner)
            if owner.draining or victim is seq:
                return None
            self.preemptions += 1
            victim.requeued = True
            self.leave(victim, SeqState.DRAINING)
        block = owner.blocks.take()
        seq.blocks.append(block)
        seq.capacity += self._block_size
        return block

    def trim(self, seq: Sequence) -> None:
        """Return the blocks that a discarded row took."""
        keep = blocks_for(max(seq.planned, seq.prefill_len), self._block_size)
        self.owners[seq.owner].blocks.release(seq.blocks[keep:])
        del seq.blocks[keep:]
        seq.capacity = keep * self._block_size

    def enter_blocks(self, seq: Sequence, committed: int) -> None:
        """Positions below `committed` have read results: the full blocks among them enter the prefix tree."""
        owner = self.owners[seq.owner]
        while seq.next_entry <= committed:
            index = seq.next_entry // self._block_size - 1
            owner.tree.enter(owner.tree.digest(seq, index), seq.blocks[index], owner.blocks)
            seq.next_entry += self._block_size
        if seq.next_entry >= seq.prompt_len:
            self._stop_computing(seq)

    def return_rows(self, seq: Sequence) -> None:
        """The slot holds no rows of images any more."""
        self.rows.give(seq.image_rows)
        seq.image_rows = 0
        seq.rows_until = NEVER

    # RUNNING -> DRAINING, FINISHED

    def leave(self, seq: Sequence, state: SeqState, *, failures: int = 0) -> None:
        """Stop running: the FREE goes out with the next plan, slot and blocks return when the last results are read.

        `failures` are added to its count while it is in no list: the count decides in which one it is.
        """
        slot = self._slot(seq)
        owner = self.owners[seq.owner]
        self.running.remove(seq)
        owner.running -= 1
        seq.failures += failures
        self._stop_computing(seq)
        owner.slots.drain(slot)
        self.free_later(slot)
        owner.draining += 1
        seq.state = state
        if state is SeqState.DRAINING:
            self._returning.append(seq)
        if seq.in_flight == 0:
            self.drained(seq)

    def drained(self, seq: Sequence) -> None:
        """No results that name the slot are unread: slot and blocks return, and a DRAINING sequence waits again."""
        owner = self.owners[seq.owner]
        owner.slots.release(self._slot(seq))
        self._let_go(seq)
        owner.draining -= 1
        if seq.state is SeqState.DRAINING:
            self._returning.remove(seq)
            self._wait(seq)

    def finish(self, seq: Sequence) -> None:
        """The sequence has its terminal event; what it holds returns when its last results are read."""
        if seq.state is SeqState.RUNNING:
            self.leave(seq, SeqState.FINISHED)
            return
        if seq.state is SeqState.WAITING:
            if self._parked.pop(seq.arrival, None) is None:
                self.queue.remove(seq)
        else:
            self._returning.remove(seq)
        seq.state = SeqState.FINISHED

    def free_later(self, slot: int) -> None:
        """The slot's FREE goes out with the next plan, once."""
        if slot not in self.frees:
            self.frees.append(slot)

    def _wait(self, seq: Sequence) -> None:
        seq.planned = 0
        seq.next_entry = NEVER
        seq.void_from = NEVER
        seq.state = SeqState.WAITING
        self.wait(seq)

    def _let_go(self, seq: Sequence) -> None:
        self._holders[self._slot(seq)] = None
        self.owners[seq.owner].blocks.release(seq.blocks)
        self.return_rows(seq)
        seq.blocks = []
        seq.capacity = 0
        seq.slot = None

    def _stop_computing(self, seq: Sequence) -> None:
        if self._computing.get(seq.group) is seq:
            del self._computing[seq.group]

    def _slot(self, seq: Sequence) -> int:
        if seq.slot is None:
            raise SchedulerError(f"{seq.request_id} ({seq.state.name}) has no slot")
        return seq.slot

    def holders(self) -> list[Sequence]:
        """The sequences that have a slot, in slot order."""
        return [seq for seq in self._holders if seq is not None]

    def check_integrity(self) -> None:
        """SchedulerError unless every owner's books add up, each by itself and together."""
        self.queue.check_integrity()
        if any(seq.state is not SeqState.WAITING or not seq.lacks_mask for seq in self._parked.values()):
            raise SchedulerError("a sequence is parked that does not wait for a mask")
        self.running.check_integrity()
        for owner in self.owners:
            self._check_owner(owner)
        self.rows.check_integrity([seq.image_rows for seq in self.holders()])
        for slot, seq in enumerate(self._holders):
            state = self.owners[slot % len(self.owners)].slots.state(slot).name
            expected = "EMPTY" if seq is None else "ACTIVE" if seq.state is SeqState.RUNNING else "DRAINING"
            if state != expected or (seq is not None and (seq.slot, seq.owner) != (slot, slot % len(self.owners))):
                raise SchedulerError(f"slot {slot} is {state}, its sequence says {expected}")
            if seq is not None and seq.capacity != len(seq.blocks) * self._block_size:
                raise SchedulerError(f"{seq.request_id} has {len(seq.blocks)} blocks and a capacity of {seq.capacity}")
        holders = self.holders()
        if len(self.running) != sum(owner.running for owner in self.owners):
            raise SchedulerError(f"{len(self.running)} sequences run, owners count others")
        returning = sum(seq.state is SeqState.DRAINING for seq in holders)
        if returning != len(self._returning) or any(seq.state is not SeqState.DRAINING for seq in self._returning):
            raise SchedulerError("the sequences that wait again later are not those that drain for it")
        if any(seq.state is not SeqState.RUNNING for seq in self._computing.values()):
            raise SchedulerError("a sequence that does not run counts as computing a prompt")

    def _check_owner(self, owner: Owner) -> None:
        """SchedulerError unless an owner's books are those of its sequences."""
        holders = [seq for seq in self.holders() if seq.owner == owner.number]
        owner.check_integrity(holders)
        active = sum(seq.state is SeqState.RUNNING for seq in holders)
        if (active, len(holders) - active) != (owner.running, owner.draining):
            raise SchedulerError(f"{active} of {len(holders)} holders run; books say {owner.running}, {owner.draining} drain")
