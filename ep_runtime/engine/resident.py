"""What an engine process keeps for its life beside the weights, whatever epochs come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ep_runtime.engine.peers import Peers


class Resident:
    """Memory that other processes write into. It is made when an epoch first needs it, and then never again."""

    def __init__(self) -> None:
        self._peers: list[Peers] = []

    def peers(self, rank: int, world: int, device: torch.device, dtype: torch.dtype) -> list[Peers]:
        """The GPU's memory for sums, for logits and for shards, not connected. A process has one rank, world, device and dtype."""
        if not self._peers:
            from ep_runtime.engine.peers import Peers

            self._peers = [Peers(rank, world, device, dtype, use) for use in ("sums", "logits", "shards")]
        return self._peers
