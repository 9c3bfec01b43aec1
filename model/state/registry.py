"""The one owner of everything that sequences leave on a rank's device, allocated from the spec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from model.spec import ModelSpec
from model.state.checksum import checksum, combine
from model.state.paged import PagedPool
from model.state.recurrent import RecurrentPool
from model.state.sizes import bytes_per_block, bytes_per_slot

__all__ = ["SlotExtent", "StateRegistry", "bytes_per_block", "bytes_per_slot"]


class SlotExtent(NamedTuple):
    """What a digest covers of one slot: its recurrent states, and the first `length` positions of `blocks` when these are given."""

    slot: int
    length: int = 0
    blocks: Sequence[int] | None = None


class StateRegistry:
    """Paged caches and recurrent states of one rank, `max_slots` sequences and `num_blocks` blocks of `block_size` positions.

    `dtype` is the model's; a state may declare its own. Allocation order is caches, then states; `close` runs the other way.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        max_slots: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        # "cuda" and "cuda:0" are one device to a user but not to a comparison: an allocation tells the full name.
        device = torch.empty(0, device=device).device
        self.spec = spec
        self.max_slots = max_slots
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.paged = PagedPool(spec.caches, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)
        self.recurrents = RecurrentPool(spec.states, max_slots=max_slots, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all state on the device."""
        return self.paged.nbytes + self.recurrents.nbytes

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of an attention layer, each `[num_blocks, block_size, kv_heads, head_dim]`."""
        return self.paged.kv(layer)

    def recurrent(self, layer: int, name: str) -> torch.Tensor:
        """A recurrent state, `[max_slots, *shape]`."""
        return self.recurrents.tensor(layer, name)

    def zero_slot(self, slot: int) -> None:
        """A new sequence starts in this slot. Paged entries are addressed by position and need no zeroing."""
        self.recurrents.zero(slot)

    def zero_block(self, block: int) -> None:
        """The block holds what it held at the start."""
        self.paged.zero(block)

    def copy_slot(self, source: int, target: int) -> None:
        """The target's recurrent states become the source's."""
        self.recurrents.copy(source, target)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to), in every layer."""
        self.paged.copy(pairs)

    def digest(self, extents: Iterable[SlotExtent | tuple[int, int, Sequence[int] | None]]) -> int:
        """u64 checksum of the given slots, in the given order: equal exactly where the bits are, whatever the slot numbers."""
        sums: list[torch.Tensor] = []
        for slot, length, blocks in extents:
            sums += self.recurrents.checksums([slot]).flatten().unbind()
            if blocks is not None:
                sums += self.paged.checksums(length, blocks)
        return combine(sums)

    def section_sums(self, slots: Sequence[int]) -> dict[str, torch.Tensor]:
        """An int64 scalar on the device for each name that recurrent states bear: of the given slots, in the given order.

        Names that differ behind a full stop alone are one: the ack of a digest has no room for each loop of a looped model.
        States of which each rank has a part of its own are left out. What is launched depends on the states, not on the slots.
        """
        keys: dict[str, list[tuple[int, str]]] = {}
        for layer, name in self.recurrents.compared:
            keys.setdefault(name.partition(".")[0], []).append((layer, name))
        return {name: checksum(self.recurrents.checksums(slots, states)) for name, states in keys.items()}

    def check_integrity(self) -> None:
        """Raise RuntimeError when a tensor is not of its declared shape, dtype and device."""
        self.paged.check_integrity()
        self.recurrents.check_integrity()

    def close(self) -> None:
        """Drop all tensors, newest owner first. The device memory returns once no view of them is left."""
        self.recurrents.close()
        self.paged.close()
