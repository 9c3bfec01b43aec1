"""Decode steps as CUDA graphs: one graph for each bucket of rows, from the token ids to the logits and the best of each row.

WARM, a command like any other, captures them on every rank, so that the collectives of the warm-up pair. A graph holds no NCCL:
its reductions go through peer memory, whose addresses are in device tables. A bucket is used only where every rank has captured it:
replayed on one rank and run eagerly on another, a step would launch different collectives. Rows past the batch are idle: slot -1,
length 0, no place. Every replay records what a digest may ask for: it is read behind the replay, before the next one.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ep_runtime.engine.block_tables import BlockTables
from model.base import Communicator, Model
from model.batch import ForwardBatch, ForwardOutput, HostBatch
from model.state.registry import StateRegistry
from protocol.commands import Span
from protocol.slots import SlotTable

log = logging.getLogger(__name__)

FIELDS = ("given", "fed", "position", "slot", "length", "place", "owner")
IDLE = {"given": 0, "fed": -1, "position": 0, "slot": -1, "length": 0, "place": -1, "owner": 0}
_IDLE_ROW = np.array([[IDLE[name]] for name in FIELDS], np.int64)


def buckets_up_to(slots: int) -> list[int]:
    """Rows of the steps that are captured: powers of two below the slots, and the slots."""
    return [*(1 << power for power in range((slots - 1).bit_length())), slots]


class FixedRows(NamedTuple):
    """What a step's replays have in common: `[rows + 1]` int32, `[rows]` int32 and int64. See `ForwardBatch`.

    Block tables `[rows, width]` int32 change, but name blocks that exist wherever a replay writes none.
    """

    starts: torch.Tensor
    write_from: torch.Tensor
    numbers: torch.Tensor
    block_tables: torch.Tensor

    @classmethod
    def of(cls, rows: int, width: int, device: torch.device) -> FixedRows:
        """Of spans that are one row each."""
        numbers = torch.arange(rows + 1, device=device)
        write_from = torch.zeros(rows, dtype=torch.int32, device=device)
        tables = torch.zeros(rows, width, dtype=torch.int32, device=device)
        return cls(numbers.int(), write_from, numbers[:rows], tables)


@dataclass(kw_only=True, slots=True)
class CapturedStep:
    """One bucket: the inputs that a replay reads, `[7, rows]` int64, the graph, and what it leaves for all `rows`."""

    rows: int
    inputs: torch.Tensor
    fixed: FixedRows
    graph: torch.cuda.CUDAGraph
    output: ForwardOutput
    collectives: int
    first: dict[int, ForwardOutput] = field(default_factory=dict)
    """By number of rows, what it leaves for the first ones: views, made once."""

    def upto(self, count: int) -> ForwardOutput:
        """What a replay leaves for the first `count` rows."""
        if count not in self.first:
            left = self.output
            self.first[count] = ForwardOutput(
                logits=None if left.logits is None else left.logits[:count],
                left=None if left.left is None else left.left.upto(count),
                slots=self.inputs[FIELDS.index("slot"), :count],
                routing=None if left.routing is None else left.routing[:, :count],
                inputs=None if left.inputs is None else left.inputs[:count],
                outputs=None if left.outputs is None else left.outputs[:count],
            )
        return self.first[count]


class DecodeGraphs:
    """The captured steps of one epoch's executor. `last_tokens [max_slots]` feeds rows whose token is still on the device."""

    def __init__(
        self,
        model: Model,
        state: StateRegistry,
        comm: Communicator,
        tables: BlockTables,
        last_tokens: torch.Tensor,
        *,
        block_size: int,
        max_length: int,
    ) -> None:
        self._model = model
        self._state = state
        self._comm = comm
        self._tables = tables
        self._last_tokens = last_tokens
        self._block_size = block_size
        self._max_length = max_length
        self._steps: list[CapturedStep] = []
        self._pool: Any = None

    def capture(self, buckets: Sequence[int]) -> None:
        """Capture every bucket, largest first, so that the smaller ones share its memory. Every rank calls it.

        A bucket whose capture fails on any rank is left out on all: its steps take a larger one, or run eagerly. A failed capture
        has launched nothing.
        """
        self._pool = torch.cuda.graph_pool_handle()
        steps = [self._capture(rows) for rows in sorted(set(buckets), reverse=True)]
        common = captured_everywhere([step is not None for step in steps], self._comm, self._last_tokens.device)
        self._steps = [step for step, kept in zip(reversed(steps), reversed(common), strict=True) if step is not None and kept]

    def bucket(self, rows: int) -> CapturedStep | None:
        """The smallest captured step with at least `rows` rows."""
        index = bisect_left(self._steps, rows, key=lambda step: step.rows)
        return self._steps[index] if index < len(self._steps) else None

    def run(self, step: CapturedStep, columns: np.ndarray) -> ForwardOutput:
        """Replay with `columns [7, rows]` int64, as FIELDS; what is left of these rows."""
        count = columns.shape[1]
        host = torch.empty(len(FIELDS), step.rows, dtype=torch.int64, pin_memory=True)
        view = host.numpy()
        view[:, :count] = columns
        if count < step.rows:
            view[:, count:] = _IDLE_ROW
        self._tables.flush()
        step.inputs.copy_(host, non_blocking=True)
        step.graph.replay()
        self._comm.launched += step.collectives
        return step.upto(count)

    def close(self) -> None:
        """Drop the graphs and their memory."""
        self._steps.clear()
        self._pool = None

    def _capture(self, rows: int) -> CapturedStep | None:
        inputs = torch.tensor([[IDLE[name]] * rows for name in FIELDS], dtype=torch.int64, device=self._last_tokens.device)
        fixed = FixedRows.of(rows, self._tables.width, inputs.device)
        # Compiles kernels, sizes workspaces and connects ranks, none of which a capture may do.
        output = self.forward(inputs, fixed)
        if output.left is not None and self._comm.rank == 0:
            output.left.pick(fixed.numbers[:1])
        self._comm.settle()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        launched = self._comm.launched
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = self.forward(inputs, fixed)
        except (RuntimeError, ValueError) as error:
            log.warning("a decode step of %d rows cannot be captured: %s", rows, error)
            return None
        finally:
            collectives, self._comm.launched = self._comm.launched - launched, launched
        return CapturedStep(rows=rows, inputs=inputs, fixed=fixed, graph=graph, output=output, collectives=collectives)

    def forward(self, inputs: torch.Tensor, fixed: FixedRows) -> ForwardOutput:
        """One decode step of `inputs [7, rows]` int64, as FIELDS."""
        from kernels.start_triton import start_rows

        rows = inputs.shape[1]
        start = start_rows(inputs, self._last_tokens, self._tables.tensor, self._block_size, fixed.block_tables)
        nothing = np.zeros(rows, dtype=np.int32)
        batch = ForwardBatch(
            token_ids=start.token_ids,
            positions=start.positions,
            query_start=fixed.starts,
            slots=start.slots,
            seq_lens=start.lengths,
            block_tables=fixed.block_tables,
            kv_write_from=fixed.write_from,
            wanted_rows=fixed.numbers,
            kv_places=inputs[FIELDS.index("place")],
            row_owner=inputs[FIELDS.index("owner")],
            host=HostBatch(
                query_start=np.arange(rows + 1, dtype=np.int32),
                seq_lens=nothing,
                slots=nothing,
                max_query=1,
                max_seq=self._max_length,
                single_lens=nothing,
            ),
            block_size=self._block_size,
            leave_logits=True,
            routing=True,
        )
        return self._model.forward(batch, self._state, self._comm)


def columns_of(spans: Sequence[Span], tokens: np.ndarray, slots: SlotTable, shifts: Sequence[int], block_size: int) -> np.ndarray:
    """`[7, rows]` int64, as FIELDS, of spans of one row each. `tokens` are those of rows that are not fed.

    All are rank 0's: where ranks divide the sequences, the caller says whose they are.

    `shifts`, by slot, are what images add to positions; none for a model that takes no images.
    """
    numbers = [span.slot for span in spans]
    starts = [span.start for span in spans]
    tables = [slots[number].blocks for number in numbers]  # type: ignore[union-attr]
    columns = np.empty((len(FIELDS), len(spans)), np.int64)
    given, fed, position, slot, length, place, owner = columns
    position[:] = starts
    slot[:] = numbers
    place[:] = [blocks[start // block_size] for blocks, start in zip(tables, starts, strict=True)]
    place *= block_size
    place += position % block_size
    np.add(position, 1, out=length)
    given[:] = 0
    owner[:] = IDLE["owner"]
    fed[:] = slot
    if len(tokens):
        is_given = [not span.fed for span in spans]
        given[is_given] = tokens
        fed[is_given] = IDLE["fed"]
    if any(shifts):
        position += [shifts[number] for number in numbers]
    return columns


def captured_everywhere(captured: Sequence[bool], comm: Communicator, device: torch.device) -> list[bool]:
    """For each capture, whether it succeeded on all ranks. One collective, whatever happened here."""
    counts = comm.reduce(torch.tensor(captured, dtype=torch.float32, device=device))
    comm.settle()
    return [count == comm.world for count in counts.tolist()]
