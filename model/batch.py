"""The one input of a forward: rows grouped by sequence, whatever mix of prompt pieces and decode rows they are.

Shape letters: T rows, S spans (sequences in this batch), B blocks in the longest block table, W wanted rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

Array = np.ndarray


class HostBatch(NamedTuple):
    """The same index arrays on the host, so that planning a kernel never waits for the device. int32 numpy arrays."""

    query_start: Array
    seq_lens: Array
    slots: Array
    max_query: int
    max_seq: int


@dataclass(kw_only=True, slots=True)
class ForwardBatch:
    """Rows of S sequences, concatenated in span order.

    Span s owns rows `query_start[s] : query_start[s+1]`; they are the last rows of a sequence that has `seq_lens[s]` positions
    after this forward, so its first row is at position `seq_lens[s] - (query_start[s+1] - query_start[s])`. Index tensors are int32 on
    the model's device; `token_ids` is int64.
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
    host: HostBatch
    block_size: int
    adapter: torch.Tensor | None = None
    """[S] adapter ids, None when no adapter is loaded."""
    hidden_rows: bool = False
    """Return the final hidden states of the wanted rows too."""
    captures: tuple[int, ...] = ()
    """Layers whose output is captured for the wanted rows."""
    routing: bool = False
    """Record each MoE layer's expert choice, for DIGEST."""

    @property
    def num_rows(self) -> int:
        """T"""
        return int(self.token_ids.shape[0])

    @property
    def num_spans(self) -> int:
        """S"""
        return len(self.host.slots)

    @property
    def decode_only(self) -> bool:
        """True when every span is one row."""
        return self.host.max_query == 1


@dataclass(kw_only=True, slots=True)
class ForwardOutput:
    """What a forward returns, for the wanted rows alone, in the order of `wanted_rows`."""

    logits: torch.Tensor | None
    """[W, vocab] float32 on the head; None on ranks that do not sample."""
    hidden: torch.Tensor | None = None
    """[W, hidden], after the final norm, when the batch asked for it."""
    captures: dict[int, torch.Tensor] = field(default_factory=dict)
    """layer -> [W, hidden]"""
    routing: torch.Tensor | None = None
    """[moe layers, T, k] int32 expert numbers, when the batch asked for it."""
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
