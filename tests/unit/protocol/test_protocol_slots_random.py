"""The slot table under random commands, against a tiny independent model of what the protocol's page says."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol.commands import BATCH, Alloc, Copy, Decode, Free, Loops, Mixed, Span, Vision, VisionGrid, Wanted
from protocol.errors import EpCommandFailed
from protocol.slots import (
    Change,
    SlotLimits,
    SlotStatus,
    SlotTable,
    apply,
    check_integrity,
    poison,
    prepare,
    table_digest,
    undo,
)

LIMITS = SlotLimits(
    max_slots=4,
    num_blocks=12,
    block_size=4,
    max_length=24,
    max_rows=16,
    world=2,
    max_adapter=1,
    max_vision_rows=12,
    max_loops=3,
)


def span(slot, start, length, blocks=(), fed=False, sampled=False, depth=0):
    wanted = Wanted.LAST if sampled else Wanted.NONE
    return Span(slot, start, length, fed, sampled, wanted, list(blocks), depth)


def positions(grids):
    """Every position of these grids, in order."""
    return [grid.start + place for grid in grids for place in range(grid.height * grid.width)]


class Slots(RuleBasedStateMachine):
    """Random commands, valid and not, against a model of plain dicts that says only what the protocol's page says.

    A block is free when no sequence names it, and may be shared when every row of it, in every sequence that names it, is there.
    """

    @initialize()
    def start(self):
        self.table = SlotTable(LIMITS)
        self.model: dict[int, dict] = {}

    def held(self):
        return {block for sequence in self.model.values() for block in sequence["blocks"]}

    def free_blocks(self):
        return [block for block in range(LIMITS.num_blocks) if block not in self.held()]

    def attempt(self, command, seq_id, allowed):
        before = table_digest(self.table)
        try:
            change = prepare(command, seq_id, self.table, LIMITS)
        except EpCommandFailed:
            assert not allowed, command
            assert table_digest(self.table) == before
            return False
        assert allowed, command
        assert table_digest(self.table) == before
        apply(change, self.table)
        return True

    @staticmethod
    def new(blocks, length, budget, prompt=0, grids=(), most=1):
        """What the model says of a slot that has just been filled. Its images' rows are those of grids not yet passed."""
        state = {"blocks": blocks, "length": length, "budget": budget, "feed": False, "poisoned": False}
        return state | {"prompt": prompt, "grids": grids, "rows": 0, "most": most}

    @rule(
        slot=st.integers(0, 4),
        budget=st.integers(1, 25),
        spare=st.integers(-1, 8),
        short=st.booleans(),
        loops=st.sampled_from([(1, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 2), (4, 0), (3, 1)]),
    )
    def alloc(self, slot, budget, spare, short, loops):
        prompt = max(0, budget - spare)
        most, thresholds = loops
        if most > 1 and short:
            prompt = min(prompt, 4)
        allowed = slot < 4 and slot not in self.model and budget <= 24 and prompt <= budget
        allowed &= most <= 3 and thresholds in (0, most - 1) and (most == 1 or prompt > 0)
        if self.attempt(Alloc(token_budget=budget, prompt_length=prompt, loops=Loops(most, [0.5] * thresholds)), slot, allowed):
            self.model[slot] = self.new([], 0, budget, prompt, most=most)

    @rule(slot=st.integers(0, 3), source=st.integers(0, 3), count=st.integers(1, 3), budget=st.integers(1, 24))
    def alloc_prefix(self, slot, source, count, budget):
        """A prefix hit on another slot's first blocks."""
        if source not in self.model or len(self.model[source]["blocks"]) < count:
            return
        blocks = self.model[source]["blocks"][:count]
        full = all(
            (sequence["blocks"].index(block) + 1) * 4 <= sequence["length"]
            for sequence in self.model.values()
            for block in blocks
            if block in sequence["blocks"]
        )
        allowed = slot not in self.model and full and count * 4 < budget
        command = Alloc(token_budget=budget, prompt_length=budget, prefix_length=count * 4, prefix_blocks=list(blocks))
        if self.attempt(command, slot, allowed):
            self.model[slot] = self.new(list(blocks), count * 4, budget, budget)

    @rule(slot=st.integers(0, 4))
    def free(self, slot):
        if self.attempt(Free(), slot, slot < 4):
            self.model.pop(slot, None)

    @rule(data=st.data())
    def forward(self, data):
        slots = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
        free = self.free_blocks()
        spans, allowed, rows = [], True, 0
        for slot in slots:
            sequence = self.model.get(slot, self.new([], 0, 0))
            length = data.draw(st.integers(1, 9))
            depth = data.draw(st.sampled_from([0, 0, 0, 0, 0, 1, 3]))
            if sequence["most"] > 1 and data.draw(st.integers(0, 4)):
                length = 1 if sequence["length"] else max(1, sequence["prompt"])
            fed = data.draw(st.booleans())
            end = sequence["length"] + length
            need = max(0, -(-end // 4) - len(sequence["blocks"]))
            count = max(0, need + data.draw(st.sampled_from([0, 0, 0, 0, -1, 1])))
            blocks = [free.pop(0) if free else 0 for _ in range(count)]
            total = len(sequence["blocks"]) + count
            rows += length
            allowed &= slot in self.model and not sequence["poisoned"] and end <= sequence["budget"]
            allowed &= sequence["feed"] or not fed
            if sequence["most"] == 1:
                allowed &= depth == 0
            elif sequence["length"] == 0:
                allowed &= length == sequence["prompt"] and depth == 0
            else:
                allowed &= length == 1 and sequence["length"] >= sequence["prompt"]
                allowed &= depth == 0 or (depth <= sequence["most"] and not fed)
            allowed &= total * 4 >= end and (not count or total <= -(-sequence["budget"] // 4))
            allowed &= not (set(blocks) & self.held()) and len(set(blocks)) == count
            spans.append(span(slot, sequence["length"], length, blocks, fed, data.draw(st.booleans()), depth))
        given_blocks = [block for part in spans for block in part.new_blocks]
        allowed &= len(set(given_blocks)) == len(given_blocks) and rows <= 16
        if self.attempt(Mixed(spans=spans), BATCH, allowed):
            for part in spans:
                sequence = self.model[part.slot]
                sequence["length"] += part.length
                sequence["blocks"] += part.new_blocks
                sequence["feed"] = part.sampled
                if sequence["grids"] and sequence["length"] >= max(positions(sequence["grids"])) + 1:
                    sequence["rows"] = 0

    @rule(data=st.data())
    def vision(self, data):
        ready = [slot for slot, sequence in self.model.items() if not sequence["poisoned"] and not sequence["grids"]]
        slot = data.draw(st.sampled_from([*ready, *ready, *ready, *self.model, 3]))
        sequence = self.model.get(slot, self.new([], 0, 0))
        length, prompt = sequence["length"], sequence["prompt"]
        grids, place = [], data.draw(st.sampled_from([length, length, length + 1, max(0, length - 2)]))
        for _ in range(data.draw(st.sampled_from([1, 1, 2, 3]))):
            grid = VisionGrid(place, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)))
            grids.append(grid)
            place = max(0, grid.start + grid.height * grid.width + data.draw(st.sampled_from([0, 0, 0, 1, 1, 2, 2, -1])))
        skipped = (
            data.draw(st.integers(0, len(grids))) if data.draw(st.integers(0, 5)) == 5 else sum(g.start < length for g in grids)
        )
        taken, kept = positions(grids[:skipped]), positions(grids[skipped:])
        rows = len(kept) + data.draw(st.sampled_from([0, 0, 0, 0, 0, 0, 0, 1]))
        every = taken + kept
        allowed = slot in self.model and not sequence["poisoned"] and not sequence["grids"]
        allowed &= every == sorted(set(every)) and max(every) < prompt and rows == len(kept)
        allowed &= all(position < length for position in taken) and all(position >= length for position in kept)
        allowed &= sum(other["rows"] for other in self.model.values()) + rows <= 12
        command = Vision(grids=grids, rows=rows, skipped=skipped)
        if not self.attempt(command, slot, allowed):
            return
        if data.draw(st.booleans()):
            undo(Change(shown=(slot, command)), self.table)
        else:
            sequence["grids"], sequence["rows"] = tuple(grids), rows

    @rule(slot=st.integers(0, 3), source=st.integers(0, 3), length=st.integers(1, 12), budget=st.integers(1, 24))
    def copy(self, slot, source, length, budget):
        if source not in self.model:
            return
        origin = self.model[source]
        free = self.free_blocks()
        shared = origin["blocks"][: length // 4]
        pairs = [(origin["blocks"][length // 4], free[0])] if length % 4 and free and length <= origin["length"] else []
        allowed = (
            slot not in self.model
            and not origin["poisoned"]
            and length <= min(origin["length"], budget)
            and (len(pairs) == 1) == (length % 4 > 0)
            and all(position < length for position in positions(origin["grids"]))
        )
        command = Copy(source=source, length=length, token_budget=budget, shared_blocks=shared, block_pairs=pairs)
        if self.attempt(command, slot, allowed):
            blocks = [*shared, *(block for _, block in pairs)]
            self.model[slot] = self.new(blocks, length, budget, origin["prompt"], origin["grids"], origin["most"])

    @rule(slot=st.integers(0, 3))
    def fail(self, slot):
        """A forward that ran and failed on every rank."""
        if slot in self.model:
            poison(Decode(spans=[span(slot, 0, 1)]), self.table)
            self.model[slot] |= {"poisoned": True, "feed": False}

    @invariant()
    def table_is_the_model(self):
        check_integrity(self.table, LIMITS)
        found = {
            slot: {
                "blocks": state.blocks,
                "length": state.length,
                "budget": state.token_budget,
                "feed": state.can_feed,
                "poisoned": state.status is SlotStatus.POISONED,
                "prompt": state.prompt_length,
                "grids": state.grids,
                "rows": state.rows,
                "most": 1 if state.loops is None else state.loops.most,
            }
            for slot, state in enumerate(self.table)
            if state is not None
        }
        assert found == self.model


Slots.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestSlots = Slots.TestCase
