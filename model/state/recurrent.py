"""The recurrent states: one slot-indexed tensor for each thing that a layer keeps per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model.spec import StateSpec
from model.state.checksum import checksum_rows, device_index
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
        """A new sequence starts in this slot. On a GPU the states of a dtype are zeroed together, by a launch or a few."""
        self._check(slot)
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in self._states.values():
            kinds.setdefault(tensor.dtype, []).append(tensor[slot])
        for states in kinds.values():
            torch._foreach_zero_(states)

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

    def checksums(self, slots: Sequence[int], keys: Sequence[tuple[int, str]] | None = None) -> torch.Tensor:
        """int64 `[states, n]` on the device: checksums over each of `slots`, of all states or of those that `keys` name.

        A state is read once for all slots, and the host waits for nothing.
        """
        for slot in slots:
            self._check(slot)
        keys = list(self._states) if keys is None else keys
        rows = device_index(slots, self._device)
        sums = [checksum_rows(self._states[key], rows) for key in keys]
        return torch.stack(sums) if sums else torch.zeros(0, len(slots), dtype=torch.int64, device=self._device)

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
