"""The seam between layers and kernels: a layer owns parameters and projections, its operators do the rest.

`TorchOperators` calls the torch code that is the specification; `model.layers.fused` has the GPU kernels. A model has one of them
for its life, chosen by the device and the forward mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from kernels.pairs import Pairs
    from kernels.shards_triton import LeftLogits
    from model.base import Communicator
    from model.batch import ForwardBatch
    from model.layers.attention import Attention
    from model.layers.delta_net import GatedDeltaNet
    from model.layers.head import VocabHead
    from model.layers.linear import Linear
    from model.layers.mlp import Mlp
    from model.layers.moe import Moe
    from model.layers.norm import RMSNorm
    from model.layers.rotary import Rotary
    from model.layers.step import Step


@dataclass(slots=True)
class Pending:
    """A layer's output that the residual has not taken yet.

    With `partial` it is this rank's share of a sum over ranks: with `owned` one whose rows are their owner's alone, and zeros
    elsewhere, or anything in a step with `Step.row_owner`. A shared expert's output and the logit of its gate come on top.
    Operators whose `experts` gives pairs take them in `add_norm` and `settle`.
    """

    value: torch.Tensor | Pairs
    partial: bool = False
    owned: bool = False
    shared: torch.Tensor | None = None
    shared_gate: torch.Tensor | None = None


class Operators(Protocol):
    """What layers leave to kernels. Every method launches the same collectives on every rank."""

    takes_joined: bool
    """Whether `experts` computes a shared expert, too, that lies behind the routed ones (see `Moe`)."""

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `token_ids [T]` of `table`, `[T, hidden]`, twice: a residual, and what it began as."""
        ...

    def leave(self, head: VocabHead, rows: torch.Tensor, embedding: torch.Tensor, step: Step) -> LeftLogits | None:
        """The logits of `rows [T, hidden]`, left on their ranks; None where they have to be gathered, the same on all ranks."""
        ...

    def prepare(self, batch: ForwardBatch, rotary: Rotary, dtype: torch.dtype) -> object:
        """What the kernels of all layers need of this batch, computed once a forward; kept in `Step.prepared`."""
        ...

    def rows_stay(self, batch: ForwardBatch, comm: Communicator, x: torch.Tensor) -> bool:
        """Whether each row of the residual `x [T, hidden]` stays with the rank that keeps its sequence, alike on all ranks.

        A step for which this is so has `Step.row_owner`, and no `settle`.
        """
        ...

    def add_norm(self, x: torch.Tensor, pending: Pending | None, norm: RMSNorm, step: Step) -> torch.Tensor:
        """Add `pending` to the residual `x [T, hidden]` in place, summing over ranks what is partial; the norm of the result.

        In a step with `Step.row_owner`, x and the result are right in a rank's own rows, and the result of what is `owned` in all.
        """
        ...

    def whole(self, rows: torch.Tensor, step: Step) -> torch.Tensor:
        """`rows [T, hidden]`, of which each rank has its own in a step with `Step.row_owner`: all of them."""
        ...

    def settle(self, x: torch.Tensor, pending: Pending, step: Step) -> None:
        """`add_norm` without the norm."""
        ...

    def linear(self, layer: Linear, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The layer's projection of `x [T, in]`: `[T, out]`."""
        ...

    def attention(self, layer: Attention, projected: torch.Tensor, step: Step) -> torch.Tensor:
        """`[T, heads * head_dim]` of a layer's fused projection, through its output gate; writes and reads the cache."""
        ...

    def delta(self, layer: GatedDeltaNet, projected: torch.Tensor, step: Step) -> torch.Tensor:
        """`[T, value_heads * value_dim]` of a layer's fused projection, normed and gated; moves the slots' states on."""
        ...

    def experts(self, layer: Moe, x: torch.Tensor, step: Step) -> torch.Tensor | Pairs:
        """This rank's partial sum `[T, hidden]` over the experts chosen for `x`; records the choice when the batch asks for it."""
        ...

    def mlp(self, layer: Mlp, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of a fused projection."""
        ...

    def static(self, mixer: Attention | GatedDeltaNet, block_size: int) -> bool:
        """Whether a layer's decode step reads nothing from `batch.host` but its shapes, so that a graph may hold it."""
        ...


class TorchOperators:
    """The specification, in torch, on any device."""

    takes_joined = False

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A look-up and a copy."""
        x = functional.embedding(token_ids, table)
        return x, x.clone()

    def leave(self, head: VocabHead, rows: torch.Tensor, embedding: torch.Tensor, step: Step) -> LeftLogits | None:
        """They are gathered."""
        return None

    def prepare(self, batch: ForwardBatch, rotary: Rotary, dtype: torch.dtype) -> object:
        """Cosines and sines of the rows."""
        return rotary.tables(batch.positions, dtype)

    def rows_stay(self, batch: ForwardBatch, comm: Communicator, x: torch.Tensor) -> bool:
        """Sums go to all ranks here."""
        return False

    def whole(self, rows: torch.Tensor, step: Step) -> torch.Tensor:
        """They are."""
        return rows

    def add_norm(self, x: torch.Tensor, pending: Pending | None, norm: RMSNorm, step: Step) -> torch.Tensor:
        """Separate sums, then the norm."""
        if pending is not None:
            self.settle(x, pending, step)
        return norm(x)

    def settle(self, x: torch.Tensor, pending: Pending, step: Step) -> None:
        """A reduction, a shared expert, an addition."""
        assert isinstance(pending.value, torch.Tensor)
        value = step.comm.reduce(pending.value) if pending.partial else pending.value
        if pending.shared is not None and pending.shared_gate is not None:
            value = value + pending.shared_gate.sigmoid() * pending.shared
        x += value

    def linear(self, layer: Linear, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The layer itself, in the format of its weight."""
        return layer(x)

    def attention(self, layer: Attention, projected: torch.Tensor, step: Step) -> torch.Tensor:
        """`kernels.paged_attention`."""
        return layer.attend(projected, step)

    def delta(self, layer: GatedDeltaNet, projected: torch.Tensor, step: Step) -> torch.Tensor:
        """`kernels.causal_conv` and `kernels.gated_delta`."""
        return layer.mix(projected, step)

    def experts(self, layer: Moe, x: torch.Tensor, step: Step) -> torch.Tensor:
        """`kernels.router` and `kernels.experts`."""
        return layer.run(x, step)

    def mlp(self, layer: Mlp, gate_up: torch.Tensor) -> torch.Tensor:
        """SiLU of the first half times the second."""
        return layer.activate(gate_up)

    def static(self, mixer: Attention | GatedDeltaNet, block_size: int) -> bool:
        """The torch forms take lengths from the host."""
        return False
