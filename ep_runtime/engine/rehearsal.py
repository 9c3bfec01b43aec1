"""The largest steps, run before the first request: libraries load code late, and memory is taken late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ep_runtime.engine.own_rows import all_own
from model.batch import ForwardBatch

if TYPE_CHECKING:
    from model.base import Communicator, Model
    from model.state.registry import StateRegistry
    from protocol.slots import SlotLimits

REHEARSED_ROWS = 64
"""Of a piece beside a single row."""


def rehearse(model: Model, state: StateRegistry, comm: Communicator, limits: SlotLimits, device: torch.device) -> None:
    """Run the largest step, and one of single rows beside a piece. No slot is held.

    All rows share a block; it and the slots' recurrent states are zero again afterwards. Where ranks divide the sequences, each
    takes all of these for its own.
    """
    slots = limits.slots_of_owner
    longest = min(limits.max_length, limits.max_rows)
    whole = max(1, min(limits.max_rows // longest, slots))
    for lengths in ([longest] * whole, [1, min(longest, REHEARSED_ROWS)][-slots:]):
        batch = ForwardBatch.from_spans(
            query_lens=lengths,
            seq_lens=lengths,
            slots=range(len(lengths)),
            block_tables=[[0] * limits.blocks_for(length) for length in lengths],
            kv_write_from=[0] * len(lengths),
            wanted_rows=[sum(lengths) - 1],
            token_ids=torch.zeros(sum(lengths), dtype=torch.int64, device=device),
            block_size=limits.block_size,
            device=device,
        )
        model.forward(batch if limits.owners == 1 else all_own(batch), state, comm)
        for slot in range(len(lengths)):
            state.zero_slot(slot)
        state.zero_block(0)
