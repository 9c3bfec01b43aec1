"""What one rank does of a command where ranks divide the sequences: its own rows, in its own numbers, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ep_runtime.engine.block_tables import BlockTables
from ep_runtime.engine.epoch import LoneRank
from ep_runtime.engine.executor import Executor
from ep_runtime.engine.own_rows import idle_but_own, own_rows
from model.base import Communicator
from model.batch import ForwardBatch, ForwardOutput
from model.spec import CacheSpec, LayerKind, ModelSpec, StateSpec
from model.state.registry import StateRegistry
from protocol.commands import BATCH, Alloc, Body, Copy, Decode, Forward, Mixed, Span, Wanted
from protocol.frame import decode, encode
from protocol.slots import SequenceState, SlotLimits, SlotStatus, SlotTable

CPU = torch.device("cpu")
SIZE, SLOTS = 4, 5
SPEC = ModelSpec(
    architecture="Noted",
    family="noted",
    vocab_size=20,
    hidden_size=6,
    num_layers=2,
    layer_kinds=(LayerKind.LINEAR, LayerKind.FULL),
    caches=(CacheSpec(layer=1, kv_heads=1, head_dim=2),),
    states=(StateSpec(layer=0, name="h", shape=(3,), dtype="float32", divided=True),),
    max_positions=60,
)


class Noted:
    """A model that keeps its batches."""

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []

    def spec(self) -> ModelSpec:
        return SPEC

    def static_decode(self, block_size: int) -> bool:
        return False

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        raise AssertionError("not part of these tests")

    def forward(self, batch: ForwardBatch, state: StateRegistry, comm: Communicator) -> ForwardOutput:
        self.batches.append(batch)
        return ForwardOutput(logits=None)


class Second(LoneRank):
    """The communicator of rank 1 of 2, of which these tests launch nothing."""

    rank = 1
    world = 2


class Rank:
    """Rank 1 of 2 owners, whose slots 1 and 3 are 0 and 1 of what it keeps. Rank 0 keeps slots 0, 2 and 4."""

    def __init__(self) -> None:
        self.model = Noted()
        self.limits = SlotLimits(
            max_slots=SLOTS, num_blocks=8, block_size=SIZE, max_length=20, max_rows=32, world=2, recurrent=True, owners=2
        )
        kept = self.limits.slots_of_owner
        self.state = StateRegistry(SPEC, max_slots=kept, num_blocks=8, block_size=SIZE, dtype=torch.float32, device=CPU)
        self.executor = Executor(self.model, self.state, Second(), self.limits, CPU, dtype=torch.float32)
        self.slots = SlotTable(self.limits)

    def run(self, command: Body, slot: int = BATCH, tokens: list[int] | None = None) -> None:
        frame = decode(encode(command, slot, np.array(tokens or [], dtype=np.int32)))
        self.executor.execute(frame, self.executor.prepare(frame, self.slots), self.slots, sample)

    def alloc(self, *slots: int) -> None:
        for slot in slots:
            self.run(Alloc(token_budget=16, prompt_length=4, owner_rank=slot % 2), slot)

    @property
    def h(self) -> torch.Tensor:
        return self.state.recurrent(0, "h")


def sample(output: ForwardOutput, command: Forward) -> torch.Tensor:
    """Of the n-th sampled span the token n."""
    return torch.arange(sum(span.sampled for span in command.spans))


def prompt(slot: int, rows: int, blocks: list[int], start: int = 0) -> Span:
    return Span(slot, start, rows, False, False, Wanted.NONE, blocks)


def test_a_new_sequence_clears_the_state_of_its_own_slot_alone() -> None:
    rank = Rank()
    rank.h.fill_(7)
    rank.alloc(0, 2, 4)
    assert bool((rank.h == 7).all())
    rank.alloc(3)
    assert rank.h[:, 0].tolist() == [7, 0, 7]


def test_a_copy_moves_what_is_kept_here_and_nothing_of_another_owner() -> None:
    rank = Rank()
    rank.alloc(0, 1)
    rank.run(Mixed(spans=[prompt(0, 6, [0, 1]), prompt(1, 6, [0, 1])]), tokens=[5] * 12)
    rank.h[0] = 3
    keys, values = rank.state.kv(1)
    keys[1], values[1] = 4, 5
    rank.run(Copy(source=0, length=6, token_budget=9, block_pairs=[(0, 2), (1, 3)]), 2)
    assert not bool(rank.h[1:].any() or keys[2:].any() or values[2:].any())
    rank.run(Copy(source=1, length=6, token_budget=9, block_pairs=[(0, 2), (1, 3)]), 3)
    assert rank.h[:, 0].tolist() == [3, 3, 0]
    assert (bool((keys[3] == 4).all()), bool((values[3] == 5).all())) == (True, True)


def test_a_batch_has_all_rows_and_its_own_ones_by_their_numbers_here() -> None:
    """Of slots 2, 3, 0 and 1 with 2, 3, 1 and 2 rows, this rank has the rows 2 to 4 and 6 to 7, in its slots 1 and 0."""
    rank = Rank()
    rank.alloc(0, 1, 2, 3)
    rank.run(Mixed(spans=[prompt(1, 3, [6])]), tokens=[9] * 3)
    tokens = list(range(10, 18))
    spans = [prompt(2, 2, [0]), prompt(3, 3, [5]), prompt(0, 1, [1]), prompt(1, 2, [7], start=3)]
    rank.run(Mixed(spans=spans), tokens=tokens)
    batch = rank.model.batches[-1]
    assert batch.token_ids.tolist() == tokens
    assert (batch.slots.tolist(), batch.seq_lens.tolist()) == ([2, 3, 0, 1], [2, 3, 1, 5])
    assert batch.own is not None
    assert batch.row_owner is not None
    assert (batch.row_owner.tolist(), batch.busiest) == ([0, 0, 1, 1, 1, 0, 1, 1], 5)
    own = batch.own.batch
    assert batch.own.rows.tolist() == [2, 3, 4, 6, 7]
    assert own is not None
    assert own.token_ids.tolist() == [12, 13, 14, 16, 17]
    assert (own.slots.tolist(), own.seq_lens.tolist(), own.positions.tolist()) == ([1, 0], [3, 5], [0, 1, 2, 3, 4])
    assert own.block_tables.tolist() == [[5, 0], [6, 7]]
    assert own.kv_places.tolist() == [20, 21, 22, 27, 28]
    assert len(own.wanted_rows) == 0


def test_a_batch_may_have_no_row_of_this_rank() -> None:
    rank = Rank()
    rank.alloc(2)
    rank.run(Mixed(spans=[prompt(2, 2, [0])]), tokens=[1, 2])
    own = rank.model.batches[-1].own
    assert own is not None
    assert (own.batch, own.rows.tolist()) == (None, [])


def test_three_part_positions_go_with_their_rows() -> None:
    def state(slot: int) -> SequenceState:
        return SequenceState(slot=slot, status=SlotStatus.ACTIVE, length=0, token_budget=9, blocks=[slot])

    spans = [prompt(0, 2, []), prompt(1, 3, [])]
    positions = np.arange(15, dtype=np.int32).reshape(3, 5)
    own = own_rows(spans, [state(0), state(1)], [None, 0], torch.arange(5), block_size=SIZE, positions=positions)
    assert own.batch is not None
    assert own.batch.positions.tolist() == positions[:, 2:].tolist()


def test_rows_of_others_are_idle_in_a_captured_step() -> None:
    rows = [[9] * 4, [-1] * 4, [4, 5, 6, 7], [0, 3, 1, 2], [5, 6, 7, 8], [50, 60, 70, 80], [0] * 4]
    columns = np.array(rows, np.int64)
    idle_but_own(columns, [None, 1, 0, None], [0, 1, 1, 2])
    assert columns.tolist() == [*rows[:3], [-1, 1, 0, -1], [0, 6, 7, 0], [-1, 60, 70, -1], [0, 1, 1, 2]]


def test_a_captured_step_has_its_own_block_tables_and_feeds_every_slot() -> None:
    """The tables of the slots that are kept here; what the graph is given of the others is idle. Tokens are everywhere."""
    rank = Rank()

    class Tables(BlockTables):
        def flush(self) -> None:
            self.tensor.view(-1)[self._places] = torch.tensor(self._values, dtype=torch.int32)

    given: list[Any] = []

    class Graphs:
        def bucket(self, rows: int) -> int:
            return rows

        def run(self, step: int, columns: Any) -> ForwardOutput:
            given.append(columns)
            return ForwardOutput(logits=torch.zeros(len(columns[0]), SPEC.vocab_size), slots=torch.tensor(columns[3]))

    tables = rank.executor._tables = Tables(rank.limits.slots_of_owner, 5, CPU)
    rank.alloc(0, 1, 2, 3)
    rank.run(Mixed(spans=[prompt(0, 3, [0]), prompt(3, 4, [6]), prompt(2, 2, [4])]), tokens=[1] * 9)
    rank.executor._graphs = Graphs()  # type: ignore[assignment]
    places: list[tuple[int, int, list[int]]] = [(0, 3, []), (3, 4, [2]), (2, 2, [])]
    spans = [Span(slot, start, 1, False, True, Wanted.LAST, blocks) for slot, start, blocks in places]
    rank.run(Decode(spans=spans), tokens=[11, 12, 13])
    tables.flush()
    assert rank.executor._last_tokens.tolist() == [0, 0, 2, 1, 0]
    assert tables.tensor.tolist() == [[0] * 5, [6, 2, 0, 0, 0], [0] * 5]
    columns = [[11, 12, 13], [-1] * 3, [3, 4, 2], [-1, 1, -1], [0, 5, 0], [-1, 8, -1], [0, 1, 0]]
    assert [list(column) for column in given[0]] == columns
