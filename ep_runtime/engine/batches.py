"""A forward command as a batch: which token is in which row, which rows want logits, how many loops they run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from model.batch import ForwardBatch, LoopRows
from protocol.commands import Forward, Span, Wanted
from protocol.slots import SequenceState


def batch_of(
    spans: Sequence[Span],
    states: Sequence[SequenceState],
    slots: Sequence[int],
    token_ids: torch.Tensor,
    *,
    block_size: int,
    positions: np.ndarray | None,
    wanted: Sequence[int] = (),
    inserted: tuple[np.ndarray, torch.Tensor] | None = None,
    owners: Sequence[int] | None = None,
) -> ForwardBatch:
    """The batch of some spans with the states of their sequences, whose numbers are `slots`; `token_ids` `[T]` are theirs.

    `owners` are the ranks that keep them, where ranks divide the sequences.
    """
    return ForwardBatch.from_spans(
        query_lens=[span.length for span in spans],
        seq_lens=[span.start + span.length for span in spans],
        slots=slots,
        block_tables=[state.blocks for state in states],
        kv_write_from=[state.shared_blocks * block_size for state in states],
        wanted_rows=wanted,
        token_ids=token_ids,
        block_size=block_size,
        device=token_ids.device,
        positions=positions,
        inserted=inserted,
        owners=owners,
    )


def place_tokens(command: Forward, tokens: np.ndarray, first_rows: np.ndarray) -> tuple[np.ndarray, list[int], list[int]]:
    """Lay out the given tokens over the rows.

    Returns:
        token ids `[T]` int64 with 0 at fed rows, the rows to feed, and the slots they are fed from.
    """
    total = sum(span.length for span in command.spans)
    if len(tokens) == total:
        return tokens.astype(np.int64), [], []
    out = np.zeros(total, dtype=np.int64)
    fed_rows: list[int] = []
    fed_slots: list[int] = []
    given = 0
    for span, row in zip(command.spans, first_rows.tolist(), strict=True):
        count = span.length - span.fed
        if span.fed:
            fed_rows.append(row)
            fed_slots.append(span.slot)
        out[row + span.fed : row + span.length] = tokens[given : given + count]
        given += count
    return out, fed_rows, fed_slots


def loop_rows(spans: Sequence[Span], states: Sequence[SequenceState]) -> LoopRows | None:
    """How often the core runs for each span; None when it runs once for all of them."""
    loops = [state.loops for state in states]
    if all(one is None for one in loops):
        return None
    return LoopRows(
        most=tuple(1 if one is None else one.most for one in loops),
        thresholds=tuple(() if one is None else tuple(one.thresholds) for one in loops),
        depth=tuple(span.depth for span in spans),
        prompt=tuple(span.start < state.prompt_length for span, state in zip(spans, states, strict=True)),
    )


def wanted_rows(command: Forward, first_rows: np.ndarray) -> list[int]:
    """The rows of the batch whose logits the command wants, in row order."""
    rows: list[int] = []
    for span, first in zip(command.spans, first_rows.tolist(), strict=True):
        match span.wanted:
            case Wanted.NONE:
                pass
            case Wanted.LAST:
                rows.append(first + span.length - 1)
            case Wanted.ALL:
                rows.extend(range(first, first + span.length))
            case offsets:
                rows.extend(first + offset for offset in offsets)
    return rows
