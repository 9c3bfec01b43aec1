"""Which rows of a batch run together: all of them outside the core and in loop 1, those that the routing leaves in later loops.

Rows that run are in the batch's order where all do. Otherwise the spans of one row come first, then each piece's rows, ascending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from model.batch import ForwardBatch, PieceRows


class Piece(NamedTuple):
    """Rows `start .. stop - 1` of those that run are from `span`, a prompt piece whose sequence lies in `slot`."""

    start: int
    stop: int
    slot: int
    span: PieceRows


class Idle(NamedTuple):
    """Rows that belong to no sequence, as a captured step has them: `live [n]` bool, and `source [n]`, a live row for each.

    A row that lives is its own source. Where none does, all have one source, whose state is to stay.
    """

    live: torch.Tensor
    source: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Singles:
    """The n spans of one row that run.

    `at` is where their rows are among those that run (None: they are all of them), `rows [n]` int64 where in the batch. `slots [n]`
    int64, `tables [n, B]` and `lens [n]` int32 are their sequences'; `host_lens` are the lengths on the host.
    """

    at: torch.Tensor | slice | None
    rows: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    lens: torch.Tensor
    host_lens: np.ndarray
    idle: Idle | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """`index [m]` int64 are the rows of the batch that run (None: all), `places [m]` int64 where their keys and values are kept."""

    index: torch.Tensor | None
    places: torch.Tensor
    singles: Singles | None
    pieces: tuple[Piece, ...]


class Chosen(NamedTuple):
    """Rows of a piece that run: `positions [m]` int64, ascending, counted in the piece; None: all of its rows."""

    span: PieceRows
    positions: torch.Tensor | None


def every_row(batch: ForwardBatch, *, idle: bool) -> Rows:
    """All rows. `idle`: rows of a decode step may belong to no sequence (slot -1, length 0)."""
    if batch.decode_only:
        rows, slots = torch.arange(batch.num_rows, device=batch.slots.device), batch.slots.long()
        no_sequence = None
        if idle:
            live = slots >= 0
            no_sequence = Idle(live, torch.where(live, rows, live.int().argmax()))
            slots = slots.clamp(min=0)
        singles = Singles(
            at=None,
            rows=rows,
            slots=slots,
            tables=batch.block_tables,
            lens=batch.seq_lens,
            host_lens=batch.host.seq_lens,
            idle=no_sequence,
        )
        return Rows(index=None, places=batch.kv_places, singles=singles, pieces=())
    found = None
    if batch.single_rows is not None and batch.single_spans is not None and len(batch.single_rows):
        found = _singles(batch, batch.single_rows, batch.single_rows, batch.single_spans, batch.host.single_lens)
    slots_on_host = batch.host.slots.tolist()
    pieces = tuple(Piece(span.start, span.stop, slots_on_host[span.span], span) for span in batch.host.pieces)
    return Rows(index=None, places=batch.kv_places, singles=found, pieces=pieces)


def some_rows(batch: ForwardBatch, spans: Sequence[int], chosen: Sequence[Chosen]) -> Rows:
    """The rows of these spans of one row, and these rows of pieces. The host knows how many there are of each."""
    device, host = batch.slots.device, batch.host
    parts: list[torch.Tensor] = []
    singles = None
    if spans:
        numbers = np.array(spans, dtype=np.int64)
        on_device = torch.from_numpy(np.stack((host.query_start[numbers].astype(np.int64), numbers))).to(device, non_blocking=True)
        singles = _singles(batch, slice(0, len(spans)), on_device[0], on_device[1], host.seq_lens[numbers])
        parts.append(on_device[0])
    pieces, start = [], len(spans)
    for span, positions in chosen:
        own = torch.arange(span.start, span.stop, device=device) if positions is None else positions + span.start
        parts.append(own)
        pieces.append(Piece(start, start + len(own), int(host.slots[span.span]), span))
        start += len(own)
    index = torch.cat(parts)
    return Rows(index=index, places=batch.kv_places.index_select(0, index), singles=singles, pieces=tuple(pieces))


def _singles(
    batch: ForwardBatch, at: torch.Tensor | slice, rows: torch.Tensor, spans: torch.Tensor, host_lens: np.ndarray
) -> Singles:
    return Singles(
        at=at,
        rows=rows,
        slots=batch.slots.index_select(0, spans).long(),
        tables=batch.block_tables.index_select(0, spans),
        lens=batch.seq_lens.index_select(0, spans),
        host_lens=host_lens,
    )
