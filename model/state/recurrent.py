"""The recurrent states: one slot-indexed tensor for each thing that a layer keeps per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model.spec import StateSpec
from model.state.checksum import checksum
from model.state.paged import check_tensor
from model.state.sizes import resolve_dtype


class RecurrentPool:
    """One tensor `[max_slots, *shape]` a `StateSpec`, addressed by (layer, name)."""

    def __init__(self, states: Sequence[StateSpec], *, max_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.max_slots = max_slots
        self._device = device
        model_dtype = str(dtype).removeprefix("torch.")
        self._declared = {
            (state.layer, state.name): (
                (max_slots, *state.shape),
                getattr(torch, resolve_dtype(state.dtype, model_dtype)),
            )
            for state in states
        }
        if len(self._declared) != len(states):
            raise ValueError("two states of one layer bear the same name")
        self._divided = {(state.layer, state.name) for state in states if state.divided}
        self._states = {key: torch.zeros(shape, dtype=kind, device=device) for key, (shape, kind) in self._declared.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(tensor.nbytes for tensor in self._states.values())

    def tensor(self, layer: int, name: str) -> torch.Tensor:
        """`[max_slots, *shape]`"""
        return self._states[layer, name]

    def zero(self, slot: int) -> None:
        """A new sequence starts in this slot."""
        self._check(slot)
        for tensor in self._states.values():
            tensor[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """The target slot becomes a copy of the source."""
        self._check(source)
        self._check(target)
        for tensor in self._states.values():
            tensor[target].copy_(tensor[source])

    @property
    def compared(self) -> list[tuple[int, str]]:
        """(layer, name) of each state that is equal on all ranks, in the order of allocation."""
        return [key for key in self._states if key not in self._divided]

    def checksums(self, slot: int) -> list[torch.Tensor]:
        """One int64 scalar a state, over one slot."""
        return [self.checksum(slot, *key) for key in self._states]

    def checksum(self, slot: int, layer: int, name: str) -> torch.Tensor:
        """An int64 scalar over one slot of one state."""
        self._check(slot)
        tensor = self._states[layer, name]
        return checksum(tensor[slot].reshape(tensor.shape[1] if tensor.dim() > 1 else 1, -1))

    def check_integrity(self) -> None:
        """Raise RuntimeError when a tensor is not of its declared shape, dtype and device."""
        if self._states.keys() != self._declared.keys():
            raise RuntimeError(f"the recurrent pool holds {sorted(self._states)}, not {sorted(self._declared)}")
        for (layer, name), tensor in self._states.items():
            shape, dtype = self._declared[layer, name]
            check_tensor(f"state {name} of layer {layer}", tensor, shape, dtype, self._device)

    def close(self) -> None:
        """Drop the tensors, newest first."""
        while self._states:
            self._states.popitem()

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.max_slots:
            raise ValueError(f"slot {slot} is not in 0..{self.max_slots - 1}")
