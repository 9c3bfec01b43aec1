"""What the layers of one forward share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from model.base import Communicator
from model.batch import ForwardBatch
from model.state.registry import StateRegistry


@dataclass(kw_only=True, slots=True)
class Step:
    """One forward: its batch, the state it writes, the communicator, and the rotary tables of its rows `[T, 1, rotary_dim]`."""

    batch: ForwardBatch
    state: StateRegistry
    comm: Communicator
    cos: torch.Tensor
    sin: torch.Tensor
    routing: list[torch.Tensor] = field(default_factory=list)
    """`[T, k]` int32 of each MoE layer so far, when the batch asks for it."""
