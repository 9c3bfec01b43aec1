"""Which rows of a step a rank mixes where ranks divide the sequences: those of the sequences that it keeps.

`kept` has an entry for each span: the slot's number in what this rank keeps, or None where another rank keeps the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ep_runtime.engine.batches import batch_of
from ep_runtime.engine.staging import upload
from model.batch import ForwardBatch, OwnRows
from protocol.commands import Span
from protocol.slots import SequenceState


def own_rows(
    spans: Sequence[Span],
    states: Sequence[SequenceState],
    kept: Sequence[int | None],
    token_ids: torch.Tensor,
    *,
    block_size: int,
    positions: np.ndarray | None,
) -> OwnRows:
    """The rows of a batch whose sequences are kept here, as a batch of their own."""
    own = [(span, state, slot) for span, state, slot in zip(spans, states, kept, strict=True) if slot is not None]
    if not own:
        return OwnRows(rows=token_ids.new_empty(0), batch=None)
    numbers = np.flatnonzero(np.repeat([slot is not None for slot in kept], [span.length for span in spans]))
    (rows,) = upload([numbers], token_ids.device)
    own_spans, own_states, own_slots = zip(*own, strict=True)
    batch = batch_of(
        own_spans,
        own_states,
        own_slots,
        token_ids.index_select(0, rows),
        block_size=block_size,
        positions=None if positions is None else positions[..., numbers],
    )
    return OwnRows(rows=rows, batch=batch)


def all_own(batch: ForwardBatch) -> ForwardBatch:
    """The batch as if every sequence were kept here, for steps that no one asked for. To the ranks together they are rank 0's."""
    rows = torch.arange(batch.num_rows, device=batch.token_ids.device)
    return replace(batch, own=OwnRows(rows=rows, batch=batch), row_owner=torch.zeros_like(rows))


def idle_but_own(columns: np.ndarray, kept: Sequence[int | None], owners: Sequence[int]) -> None:
    """The slots, lengths and places of a captured step's columns become this rank's: rows that are kept elsewhere are idle.

    The rows' `owners` go with them.
    """
    slot, length, place, owner = columns[3:]
    owner[:] = owners
    slot[:] = [-1 if number is None else number for number in kept]
    elsewhere = slot < 0
    length[elsewhere] = 0
    place[elsewhere] = -1
