"""What the layers of one forward share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from model.base import Communicator
from model.batch import ForwardBatch
from model.layers.operators import Operators
from model.state.registry import StateRegistry


@dataclass(kw_only=True, slots=True)
class Step:
    """One forward: its batch, the state it writes, the communicator, and the operators with what they prepared for it."""

    batch: ForwardBatch
    state: StateRegistry
    comm: Communicator
    operators: Operators
    prepared: Any
    routing: list[torch.Tensor] = field(default_factory=list)
    """`[T, k]` int32 of each MoE layer so far, when the batch asks for it."""
    own: Step | None = None
    """For `batch.own`: what mixes its rows."""
    row_owner: torch.Tensor | None = None
    """`batch.row_owner` in a step whose rows stay with their owners: the residual is right in a rank's own rows alone."""
