"""The interface of every model, and of the communicator that it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kernels.peer_memory import PeerMemory
    from model.batch import ForwardBatch, ForwardOutput
    from model.spec import ModelSpec
    from model.state.registry import StateRegistry


class Communicator(Protocol):
    """The collectives of the current epoch, as a model sees them. Implementations count what they launch."""

    rank: int
    world: int
    launched: int
    """Collectives launched so far, so that ranks can compare."""
    peers: PeerMemory | None
    """Memory that the ranks' GPUs show each other, where there is any: kernels may sum through it instead of calling `reduce`."""
    shards: PeerMemory | None
    """Such memory for shards of logits, which may stay there instead of being gathered."""

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' `partial` (same shape and dtype), accumulated in float32 in rank order: the same bits everywhere."""
        ...

    def gather_to_head(self, shard: torch.Tensor) -> list[torch.Tensor] | None:
        """All ranks' `shard` (same shape and dtype), in rank order, on rank 0; None elsewhere. Every rank calls it."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's `tensor` overwrites every rank's."""
        ...

    def settle(self) -> None:
        """Wait for this rank's device as long as the other ranks are there: what has been launched may wait for them.

        Called before anything that would wait for the device without looking, such as reading a tensor.
        """
        ...


class SingleRank:
    """The communicator of a world of one."""

    rank = 0
    world = 1
    launched = 0
    peers: PeerMemory | None = None
    shards: PeerMemory | None = None

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The only partial is the sum."""
        return partial

    def gather_to_head(self, shard: torch.Tensor) -> list[torch.Tensor] | None:
        """The only shard."""
        return [shard]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Already everywhere."""

    def settle(self) -> None:
        """No launch waits for another rank."""


class Model(Protocol):
    """One model family, built for one rank. There is no second path through it: prompt pieces and decode rows are one forward."""

    def spec(self) -> ModelSpec:
        """Sizes, layer kinds, caches and limits, as plain data."""
        ...

    def static_decode(self, block_size: int) -> bool:
        """Whether a decode step takes nothing from the host but its shapes, so that a graph may hold it."""
        ...

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden] input embeddings of the batch's tokens."""
        ...

    def forward(self, batch: ForwardBatch, state: StateRegistry, comm: Communicator) -> ForwardOutput:
        """One ragged forward; writes the caches and recurrent states of the batch's slots."""
        ...
