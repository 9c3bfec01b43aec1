"""The one input of a forward: rows grouped by sequence, whatever mix of prompt pieces and decode rows they are.

Shape letters: T rows, S spans (sequences in this batch), B blocks in the longest block table, W wanted rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from model.errors import BatchError

if TYPE_CHECKING:
    from kernels.shards_triton import LeftLogits

Array = np.ndarray


class PieceRows(NamedTuple):
    """A span of more than one row: its number, its rows `start .. stop - 1`, and its sequence's length after this forward."""

    span: int
    start: int
    stop: int
    seq_len: int


class HostBatch(NamedTuple):
    """The same index arrays on the host, so that planning a kernel never waits for the device. int32 numpy arrays."""

    query_start: Array
    seq_lens: Array
    slots: Array
    max_query: int
    max_seq: int
    pieces: tuple[PieceRows, ...] = ()
    """The spans of more than one row, in span order."""
    single_lens: Array = np.empty(0, dtype=np.int32)
    """Sequence lengths of the spans of one row, in span order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InsertedRows:
    """Rows whose input is an image's: `rows [n]` int64, their numbers in the batch, ascending, and `values [n, row_width]`."""

    rows: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRows:
    """Rows of the sequences that this rank keeps, where ranks divide them: `rows [R]` int64, their numbers in the batch, ascending.

    `batch` has these rows alone, by the numbers that slots and blocks have on this rank; it is None where R is 0.
    """

    rows: torch.Tensor
    batch: ForwardBatch | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopRows:
    """How often a looped model runs its core for each span, on the host; one entry a span.

    A `prompt` of more than one loop is the whole prompt, routed by the model. Any other span of more than one loop is one row: it
    runs `depth` loops, or, where that is 0, `most` of them at most: it stops after loop j when the probability of its exit head is
    at least `thresholds[j - 1]`. Without thresholds every loop runs.
    """

    most: tuple[int, ...]
    thresholds: tuple[tuple[float, ...], ...]
    depth: tuple[int, ...]
    prompt: tuple[bool, ...]


@dataclass(kw_only=True, slots=True)
class ForwardBatch:
    """Rows of S sequences, concatenated in span order.

    Span s owns rows `query_start[s] : query_start[s+1]`; they are the last rows of a sequence that has `seq_lens[s]` positions
    after this forward, so its first row is at position `seq_lens[s] - (query_start[s+1] - query_start[s])`. Index tensors are
    int32 on the model's device unless they say otherwise; `token_ids` is int64.
    """

    token_ids: torch.Tensor
    """[T] int64; given tokens and those fed from the device, already in place."""
    positions: torch.Tensor
    """[T] int32, or [3, T] for three-part rotary positions."""
    query_start: torch.Tensor
    """[S + 1]"""
    slots: torch.Tensor
    """[S]"""
    seq_lens: torch.Tensor
    """[S]"""
    block_tables: torch.Tensor
    """[S, B], block numbers in position order; entries past a sequence's blocks are 0 and never read."""
    kv_write_from: torch.Tensor
    """[S]: positions below it lie in shared blocks and are not written."""
    wanted_rows: torch.Tensor
    """[W] int64: the rows whose logits (or hidden states) are returned, in row order."""
    kv_places: torch.Tensor
    """[rows that are written] int64: where their keys and values go, in positions counted over all blocks."""
    host: HostBatch
    block_size: int
    written_rows: torch.Tensor | None = None
    """int64, the rows that `kv_places` are for; None when all rows are written."""
    single_rows: torch.Tensor | None = None
    """[spans of one row] int64, their rows; None when every span is one row."""
    single_spans: torch.Tensor | None = None
    """[spans of one row] int64, their span numbers; None when every span is one row."""
    adapter: torch.Tensor | None = None
    """[S] adapter ids, None when no adapter is loaded."""
    leave_logits: bool = False
    """Every row is wanted; logits may stay where they are made, see `ForwardOutput.left`."""
    hidden_rows: bool = False
    """Return the final hidden states of the wanted rows too."""
    captures: tuple[int, ...] = ()
    """Layers whose output is captured for the wanted rows."""
    routing: bool = False
    """Record each MoE layer's expert choice, and the hidden states entering layer 0 and leaving the last, for DIGEST."""
    inserted: InsertedRows | None = None
    """Embeddings of images in this batch, in place of their placeholder tokens'."""
    loops: LoopRows | None = None
    """None: the core runs once for every span."""
    own: OwnRows | None = None
    """What mixes tokens runs over these rows alone, with caches and states by their batch. None: over all rows, by this batch;
    where ranks divide the sequences, those of others are idle rows in it then (slot -1, length 0, no place)."""
    row_owner: torch.Tensor | None = None
    """[T] int64, the same on all ranks: which of the ranks that divide the sequences keeps a row's. None: nobody has said."""
    busiest: int = 0
    """Rows of the rank that keeps most of them, by `row_owner`; 0 where the host does not know, as in a captured step."""

    @classmethod
    def from_spans(
        cls,
        *,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        slots: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        kv_write_from: Sequence[int],
        wanted_rows: Sequence[int],
        token_ids: torch.Tensor,
        block_size: int,
        device: torch.device | str,
        positions: Array | None = None,
        inserted: tuple[Array | Sequence[int], torch.Tensor] | None = None,
        owners: Sequence[int] | None = None,
    ) -> ForwardBatch:
        """A batch from plain host data, one entry a span; all indices reach the device in one copy.

        `token_ids` [T] int64 are on the device already. `positions` ([T] or [3, T]) are the rotary ones where they are not the
        rows' places in their sequences; `inserted` are the numbers and values of `InsertedRows`. `owners` are the ranks that keep
        the sequences, where ranks divide them.

        Raises BatchError for a span without rows or without blocks for its rows.
        """
        layout = _Layout.of(query_lens, seq_lens, block_tables, kv_write_from, block_size)
        host = HostBatch(
            query_start=layout.query_start,
            seq_lens=layout.seq_lens,
            slots=np.asarray(slots, dtype=np.int32),
            max_query=int(layout.query_lens.max()),
            max_seq=int(layout.seq_lens.max()),
            pieces=layout.pieces(),
            single_lens=layout.seq_lens[layout.query_lens == 1],
        )
        if len(host.slots) != len(layout.seq_lens) or token_ids.shape[0] != len(layout.positions):
            raise BatchError(f"{len(host.slots)} slots and {token_ids.shape[0]} tokens for {len(layout.seq_lens)} spans")
        every_single, every_written = host.max_query == 1, bool(layout.written.all())
        singles = np.flatnonzero(layout.query_lens == 1)
        packed = _Packed(device)
        places = packed.long(layout.places[layout.written])
        written = packed.long(np.flatnonzero(layout.written))
        wanted = packed.long(wanted_rows)
        single_rows, single_spans = packed.long(layout.query_start[singles]), packed.long(singles)
        rotary = layout.positions if positions is None else positions
        if rotary.shape[-1] != len(layout.positions):
            raise BatchError(f"{rotary.shape[-1]} positions for {len(layout.positions)} rows")
        inserted_rows = packed.long([] if inserted is None else inserted[0])
        places_in_rotary, starts, lens = packed.int(rotary.ravel()), packed.int(layout.query_start), packed.int(layout.seq_lens)
        row_owner = packed.long([] if owners is None else np.repeat(owners, layout.query_lens))
        in_slots, tables, write_from = packed.int(host.slots), packed.int(layout.tables.ravel()), packed.int(kv_write_from)
        packed.send()
        return cls(
            token_ids=token_ids,
            positions=places_in_rotary().view(rotary.shape),
            query_start=starts(),
            slots=in_slots(),
            seq_lens=lens(),
            block_tables=tables().view(layout.tables.shape),
            kv_write_from=write_from(),
            wanted_rows=wanted(),
            kv_places=places(),
            host=host,
            block_size=block_size,
            written_rows=None if every_written else written(),
            single_rows=None if every_single else single_rows(),
            single_spans=None if every_single else single_spans(),
            inserted=None if inserted is None else InsertedRows(rows=inserted_rows(), values=inserted[1]),
            row_owner=None if owners is None else row_owner(),
            busiest=0 if owners is None else int(np.bincount(owners, layout.query_lens).max()),
        )

    @property
    def num_rows(self) -> int:
        """T"""
        return int(self.token_ids.shape[0])

    @property
    def decode_only(self) -> bool:
        """True when every span is one row."""
        return self.host.max_query == 1


@dataclass(kw_only=True, slots=True)
class ForwardOutput:
    """What a forward returns, for the wanted rows alone, in the order of `wanted_rows`."""

    logits: torch.Tensor | None
    """[W, vocab] float32 on the head; None on ranks that do not sample, and where logits have been left."""
    left: LeftLogits | None = None
    """The wanted rows' logits where they were made, with the best of each: valid until the next forward."""
    slots: torch.Tensor | None = None
    """[W] int64: the wanted rows' slots, where they are on the device."""
    hidden: torch.Tensor | None = None
    """[W, hidden], after the final norm, when the batch asked for it."""
    captures: dict[int, torch.Tensor] = field(default_factory=dict)
    """layer -> [W, hidden]"""
    routing: torch.Tensor | None = None
    """[moe layers, T, k] int32 expert numbers, when the batch asked for it."""
    inputs: torch.Tensor | None = None
    """[T, hidden] hidden states entering layer 0, when the batch asked for `routing`."""
    outputs: torch.Tensor | None = None
    """[T, hidden] the residual behind the last layer whose sum it has taken, when the batch asked for `routing`. Where rows stay
    with their owners (`Operators.rows_stay`), no rank has it whole: it is the final norm's output, None if no row is wanted."""
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    depths: tuple[int, ...] | None = None
    """For each span, how many loops its row ran, 0 for a prompt; None when the batch's `loops` is None."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Host arrays of a batch: `written` and `places` say for each row whether its keys and values are stored, and where."""

    query_lens: Array
    query_start: Array
    seq_lens: Array
    positions: Array
    tables: Array
    written: Array
    places: Array

    @classmethod
    def of(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        kv_write_from: Sequence[int],
        block_size: int,
    ) -> _Layout:
        queries, lens = np.asarray(query_lens, dtype=np.int32), np.asarray(seq_lens, dtype=np.int32)
        if not len(queries) or not len(queries) == len(lens) == len(block_tables) == len(kv_write_from):
            raise BatchError("a batch needs one entry a span in every list, and a span")
        if queries.min() < 1 or (lens < queries).any():
            raise BatchError("a span has no rows, or more rows than its sequence has positions")
        blocks = -(-lens // block_size)
        for span, (table, needed) in enumerate(zip(block_tables, blocks.tolist(), strict=True)):
            if len(table) < needed:
                raise BatchError(f"span {span} has {len(table)} blocks, its {lens[span]} positions need {needed}")
        tables = np.zeros((len(lens), blocks.max()), dtype=np.int32)
        for span, (table, needed) in enumerate(zip(block_tables, blocks.tolist(), strict=True)):
            tables[span, :needed] = table[:needed]
        start = np.zeros(len(queries) + 1, dtype=np.int32)
        np.cumsum(queries, out=start[1:])
        span_of_row = np.repeat(np.arange(len(queries)), queries)
        positions = np.arange(start[-1], dtype=np.int32) + (lens - start[1:])[span_of_row]
        places = tables[span_of_row, positions // block_size].astype(np.int64) * block_size + positions % block_size
        written = positions >= np.asarray(kv_write_from, dtype=np.int32)[span_of_row]
        return cls(queries, start, lens, positions.astype(np.int32), tables, written, places)

    def pieces(self) -> tuple[PieceRows, ...]:
        """The spans of more than one row."""
        starts, lens = self.query_start.tolist(), self.seq_lens.tolist()
        return tuple(
            PieceRows(span, starts[span], starts[span + 1], lens[span]) for span in np.flatnonzero(self.query_lens > 1).tolist()
        )


class _Packed:
    """Index arrays that travel to the device in one copy.

    Each starts at a multiple of 16 bytes: kernels are compiled for pointers that do and again for those that do not, so that
    otherwise nearly every mix of lengths would compile its own.
    """

    _ALIGN = 16

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._arrays: list[Array] = []
        self._views: list[torch.Tensor] = []

    def long(self, values: Array | Sequence[int]) -> Callable[[], torch.Tensor]:
        """Add an array of int64; the answer gives its tensor once all are sent."""
        return self._add(np.asarray(values, dtype=np.int64))

    def int(self, values: Array | Sequence[int]) -> Callable[[], torch.Tensor]:
        """Add an array of int32; the answer gives its tensor once all are sent."""
        return self._add(np.asarray(values, dtype=np.int32))

    def _add(self, array: Array) -> Callable[[], torch.Tensor]:
        self._arrays.append(array)
        number = len(self._arrays) - 1
        return lambda: self._views[number]

    def send(self) -> None:
        """Copy everything and cut it up again."""
        starts, end = [], 0
        for array in self._arrays:
            starts.append(end)
            end += -(-array.nbytes // self._ALIGN) * self._ALIGN
        # From other memory than pinned, a copy of this size would wait for the steps that the device still has.
        packed = torch.empty(end, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        view = packed.numpy()
        for array, start in zip(self._arrays, starts, strict=True):
            view[start : start + array.nbytes] = array.view(np.uint8)
        data = packed.to(self._device, non_blocking=True)
        kinds = {8: torch.int64, 4: torch.int32}
        self._views = [
            data[start : start + array.nbytes].view(kinds[array.itemsize])
            for array, start in zip(self._arrays, starts, strict=True)
        ]
