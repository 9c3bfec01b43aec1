"""Runs one command on one rank: the same object on the head and on every worker.

A command has two halves. `prepare` validates it against the mirrored slot table and changes nothing; `execute` applies the change
and runs it. Everything here follows from the frame and from that table, so equal frames give equal collectives on every rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ep_runtime.engine.batches import batch_of, loop_rows, place_tokens, wanted_rows
from ep_runtime.engine.block_tables import BlockTables
from ep_runtime.engine.digest import StateDigest, log_slots, read_sums
from ep_runtime.engine.graphs import DecodeGraphs, columns_of
from ep_runtime.engine.own_rows import idle_but_own, own_rows
from ep_runtime.engine.rehearsal import rehearse
from ep_runtime.engine.staging import upload
from ep_runtime.engine.vision.forward import batch_positions, inserted_rows, placeholder_fault
from ep_runtime.engine.vision.rows import VisionRows
from model.base import Communicator
from model.batch import ForwardBatch, ForwardOutput
from model.state.checksum import checksum, mix
from protocol.commands import Alloc, Body, Copy, Digest, Forward, Free, Span, Vision, Wanted, Warm
from protocol.errors import EpCommandFailed
from protocol.preamble import RECORD_ROUTING
from protocol.sections import pack_sections
from protocol.slots import (
    Change,
    SequenceState,
    SlotLimits,
    SlotStatus,
    SlotTable,
    apply,
    check_integrity,
    check_tokens,
    prepare,
    table_sections,
)

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from model.base import Model
    from model.state.registry import StateRegistry
    from protocol.frame import Frame


class EpochCommunicator(Communicator, Protocol):
    """A communicator that can be left, and that feeds slots."""

    def feed(self, tokens: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor) -> None:
        """Rank 0's `tokens [n]` go into every rank's `last_tokens[slots]`: int64, on the device."""
        ...

    def close(self) -> None:
        """Leave the group; never waits for another rank."""
        ...


RECORDED = ("routing", "inputs", "outputs")
"""What a forward's output has beyond its results when the command asks for it, as sections of a digest."""

Choose = Callable[[ForwardOutput, Forward], torch.Tensor]
"""Takes a forward's wanted rows; gives the tokens `[n] int64` of its sampled spans, on workers a buffer for the head's."""


class Executor:
    """Owns the device side of one rank's slots: caches, recurrent state, each slot's last sampled token, and rows of images.

    Where ranks divide the sequences, caches and recurrent states are those of the rank's own; the rest is every slot's.
    """

    def __init__(
        self,
        model: Model,
        state: StateRegistry,
        comm: EpochCommunicator,
        limits: SlotLimits,
        device: torch.device,
        *,
        dtype: torch.dtype,
        graphs: bool = False,
    ) -> None:
        self.comm = comm
        self.limits = limits
        self._model = model
        self._state = state
        self._device = device
        self._last_tokens = torch.zeros(limits.max_slots, dtype=torch.int64, device=device)
        self._recorded: dict[str, torch.Tensor] = {}
        spec = model.spec()
        self._vocab_size = spec.vocab_size
        self._vision = spec.vision
        self.rows = VisionRows(limits.max_slots, 0 if spec.vision is None else spec.vision.row_width, dtype, device)
        self._tables: BlockTables | None = None
        self._graphs: DecodeGraphs | None = None
        if graphs and not model.static_decode(limits.block_size):
            log.warning("this model's decode step cannot be captured: its sizes are not those of the kernels; it runs eagerly")
        elif graphs:
            self._tables = BlockTables(limits.slots_of_owner, limits.blocks_for(limits.max_length), device)
            self._graphs = DecodeGraphs(
                model,
                state,
                comm,
                self._tables,
                self._last_tokens,
                block_size=limits.block_size,
                max_length=limits.max_length,
            )

    def offer_rows(self, rows: torch.Tensor) -> None:
        """On the head: `rows [n, row_width]` in the model's dtype are those of the next command, which is a VISION.

        That command takes them, whatever becomes of it. Raises ValueError for another width, dtype or device.
        """
        self.rows.offer(rows)

    def check_offer(self, command: Body) -> None:
        """On the head, before anything is sent: raise EpCommandFailed unless `command` has as many rows as are on offer."""
        self.rows.check_offer(command.rows if isinstance(command, Vision) else 0)

    def prepare(self, frame: Frame, slots: SlotTable) -> Change:
        """Validate `frame`'s command against the slot table. VISION's memory is reserved, until it is kept or released.

        Raises:
            EpCommandFailed: it cannot be run; nothing has changed.
            EpDiverged: it does not continue the state that this rank has.
        """
        command = frame.command
        change = prepare(command, frame.preamble.seq_id, slots, self.limits)
        if len(frame.tokens):
            check_tokens(int(frame.tokens.min()), int(frame.tokens.max()), self._vocab_size)
        if self._vision is not None and isinstance(command, Forward):
            fault = placeholder_fault(command, frame.tokens, slots, self._vision.placeholders)
            if fault is not None:
                raise EpCommandFailed(fault)
            self.rows.check_held(command.spans, slots, self.comm.rank)
        elif isinstance(command, Vision):
            self.rows.reserve(command.rows)
        return change

    def release(self) -> None:
        """Let go of what `prepare` has reserved for a command, or the head has offered it, and it has not taken."""
        self.rows.release()

    @torch.inference_mode()
    def execute(self, frame: Frame, change: Change, slots: SlotTable, choose: Choose) -> None:
        """Apply `change` and run the command. The slot table moves first: it is host state in command order."""
        command = frame.command
        if self._tables is not None:
            self._note_blocks(self._tables, change, slots)
        images = slots.vision_rows > 0
        apply(change, slots)
        match command:
            case Forward():
                try:
                    self._forward(frame, command, slots, choose, images)
                finally:
                    self.rows.pass_by(command.spans, slots)
            case Alloc():
                self.rows.drop(frame.preamble.seq_id)
                kept = self._kept(frame.preamble.seq_id)
                if kept is not None:
                    self._state.zero_slot(kept)
            case Free():
                self.rows.drop(frame.preamble.seq_id)
            case Vision():
                self._show(frame.preamble.seq_id, command)
            case Copy():
                self._copy(frame.preamble.seq_id, command)
            case Warm():
                self._warm(command)
            case Digest(report=True):
                log_slots(self.comm.rank, slots)
            case _:
                pass  # the others move the table alone, or nothing

    def close(self) -> None:
        """Leave the communicator, after which nothing runs on the device, and drop graphs and rows of images."""
        self.comm.close()
        self.rows.close()
        if self._graphs is not None:
            self._graphs.close()

    def digest(self, slots: SlotTable) -> StateDigest:
        """What this rank holds: the slot table, the live recurrent states, rows of images, and the last recorded forward.

        When no slot is held, the table's index of blocks and the state's tensors are checked, too.

        Raises:
            EpDiverged: the index does not add up.
            RuntimeError: a tensor is not as declared.
        """
        # A failed forward leaves its slots' state as each rank had got to: unknown, and not to be compared.
        live = [self._kept(s.slot) for s in slots if s is not None and s.status is SlotStatus.ACTIVE]
        states = self._state.section_sums([slot for slot in live if slot is not None])
        found = read_sums(states | self._recorded | self.rows.section_sum(slots), self.comm)
        sections = table_sections(slots) | {name: found.get(name, 0) for name in (*states, *RECORDED, "rows")}
        if all(state is None for state in slots):
            check_integrity(slots, self.limits)
            self._state.check_integrity()
            self.rows.check_integrity(slots)
        return StateDigest(mix(sections.values()), pack_sections(sections))

    def _forward(self, frame: Frame, command: Forward, slots: SlotTable, choose: Choose, images: bool) -> None:
        """One forward. `images`: some slot held rows of images before it."""
        routing = bool(frame.preamble.flags & RECORD_ROUTING)
        output = self._replay(command, frame.tokens, slots, images)
        if output is None:
            batch = self._batch(command, frame.tokens, slots, images)
            batch.routing = routing
            output = self._model.forward(batch, self._state, self.comm)
        if routing:
            self._record(output)
        if any(span.wanted is not Wanted.NONE for span in command.spans):
            tokens = choose(output, command)
            sampled = [span.slot for span in command.spans if span.sampled]
            if not sampled:
                return
            # Where ranks divide the sequences, a replay's slots are this rank's numbers.
            index = output.slots if self.limits.owners == 1 else None
            if index is None or len(sampled) < len(command.spans):
                (index,) = upload([np.array(sampled, np.int64)], self._device)
            self.comm.feed(tokens, index, self._last_tokens)

    def _record(self, output: ForwardOutput) -> None:
        """Keep checksums of what a forward was asked to record, on the device: DIGEST reads them."""
        recorded = {name: getattr(output, name) for name in RECORDED}
        self._recorded = {name: checksum(tensor) for name, tensor in recorded.items() if tensor is not None}

    def _show(self, slot: int, command: Vision) -> None:
        """The head's rows go to every rank; the slot keeps them."""
        rows = self.rows.filled()
        if rows is not None:
            self.comm.broadcast(rows)
        self.rows.keep(slot, command)

    def _replay(self, command: Forward, tokens: np.ndarray, slots: SlotTable, images: bool) -> ForwardOutput | None:
        """A step of single rows that all want logits, from its graph; None when it is another kind of step, or has no graph."""
        spans = command.spans
        last = Wanted.LAST
        if self._graphs is None or not all(span.length == 1 and span.wanted is last for span in spans):
            return None
        step = self._graphs.bucket(len(spans))
        if step is None:
            return None
        if images and any(_active(slots, span.slot).before_image_end(span.start) for span in spans):
            return None  # a row of a prompt, whose input or position is an image's
        if slots.looped and any(_active(slots, span.slot).loops is not None for span in spans):
            return None  # how many loops a row runs may not be known before it runs
        shifts = () if self._vision is None else self.rows.shifts
        columns = columns_of(spans, tokens, slots, shifts, self.limits.block_size)
        if self.limits.owners > 1:
            idle_but_own(columns, [self._kept(span.slot) for span in spans], self._owners(spans))
        return self._graphs.run(step, columns)

    def _batch(self, command: Forward, tokens: np.ndarray, slots: SlotTable, images: bool) -> ForwardBatch:
        spans = command.spans
        lengths = np.fromiter((s.length for s in spans), dtype=np.int64, count=len(spans))
        first_rows = np.cumsum(lengths) - lengths
        token_ids, fed_rows, fed_slots = place_tokens(command, tokens, first_rows)
        ids, rows, sources = upload([token_ids, np.array(fed_rows, np.int64), np.array(fed_slots, np.int64)], self._device)
        if fed_rows:
            ids.index_copy_(0, rows, self._last_tokens.index_select(0, sources))
        states = [_active(slots, s.slot) for s in spans]
        shifts = [self.rows.shifts[s.slot] for s in spans]
        shifted = images or any(shifts)
        positions = batch_positions(spans, states, shifts, first_rows, lengths) if shifted else None
        batch = batch_of(
            spans,
            states,
            [span.slot for span in spans],
            ids,
            block_size=self.limits.block_size,
            positions=positions,
            wanted=wanted_rows(command, first_rows),
            inserted=inserted_rows(spans, states, self.rows.held, first_rows) if images else None,
            owners=self._owners(spans) if self.limits.owners > 1 else None,
        )
        if slots.looped:
            batch.loops = loop_rows(spans, states)
        if self.limits.owners > 1:
            kept = [self._kept(span.slot) for span in spans]
            batch.own = own_rows(spans, states, kept, ids, block_size=self.limits.block_size, positions=positions)
        return batch

    def _kept(self, slot: int) -> int | None:
        return self.limits.kept(slot, self.comm.rank)

    def _owners(self, spans: Sequence[Span]) -> list[int]:
        """The ranks that keep the spans' sequences, where ranks divide them."""
        return [self.limits.owner(span.slot) for span in spans]

    def _note_blocks(self, tables: BlockTables, change: Change, slots: SlotTable) -> None:
        """What `change`, not applied yet, does to the block tables."""
        if change.filled is not None:
            kept = self._kept(change.filled.slot)
            if kept is not None:
                tables.set(kept, 0, change.filled.blocks)
        for span in change.spans:
            if span.new_blocks:
                kept = self._kept(span.slot)
                if kept is not None:
                    tables.set(kept, len(_active(slots, span.slot).blocks), span.new_blocks)

    def _copy(self, target: int, command: Copy) -> None:
        source, kept = self._kept(command.source), self._kept(target)
        if source is not None and kept is not None:
            self._state.copy_slot(source, kept)
            self._state.copy_blocks(command.block_pairs)
        self.rows.copy(command.source, target)
        self._last_tokens[target] = self._last_tokens[command.source]

    def _warm(self, command: Warm) -> None:
        """Connect the communicator before the first request needs it, capture decode steps where they are to be graphs, rehearse
        the largest step on a GPU, and launch what a digest launches."""
        if not command.buckets:
            return
        began = time.monotonic()
        self.comm.broadcast(torch.zeros(max(command.buckets), dtype=torch.int64, device=self._device))
        self.comm.feed(self._last_tokens[:1].clone(), torch.zeros(1, dtype=torch.int64, device=self._device), self._last_tokens)
        self.comm.settle()
        connected = time.monotonic()
        if self._graphs is not None:
            self._graphs.capture(command.buckets)
        captured = time.monotonic()
        if self._device.type == "cuda":
            self.rehearse()
        recorded = torch.zeros(1, 2, dtype=torch.int32, device=self._device)
        read_sums(self._state.section_sums([0]) | {"": checksum(recorded)}, self.comm)
        parts = (connected - began, captured - connected, time.monotonic() - captured)
        log.info("warm: connected in %.2f s, captured in %.2f s, rehearsed in %.2f s", *parts)

    def rehearse(self) -> None:
        """Run the largest steps; see `rehearsal`. It is for WARM, when no slot is held."""
        rehearse(self._model, self._state, self.comm, self.limits, self._device)


def _active(slots: SlotTable, slot: int) -> SequenceState:
    state = slots[slot]
    assert state is not None, f"slot {slot} passed prepare but is empty"
    return state
