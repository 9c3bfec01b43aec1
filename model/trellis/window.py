"""The sliding cache during a call: the window that loops work on, opened from a ring and committed to a fresh one at the end.

The ring is not written while loops run: loop 1 of a late token would evict entries that an early token still needs at loop 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from model.trellis.state import SlidingCache, StateShape


class Window(NamedTuple):
    """Entries `[B, old + tokens, Hkv, hd]` in the cache's dtype: final ones, oldest first, then the call's."""

    k: torch.Tensor
    v: torch.Tensor


def fresh_window(shape: StateShape, batch: int, tokens: int, *, dtype: torch.dtype, device: torch.device) -> Window:
    """Zeros for the entries of a call that starts at position 0 and keeps no state."""
    size = (batch, tokens, shape.kv_heads, shape.head_dim)
    return Window(torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device))


def open_window(ring: SlidingCache, position: int, tokens: int) -> Window:
    """The newest `min(position, window)` entries of the ring, and zeros for the call's."""

    def opened(slots: torch.Tensor) -> torch.Tensor:
        size = slots.shape[1]
        first = (position - min(position, size)) % size
        held = slots[:, :position] if position < size else torch.cat((slots[:, first:], slots[:, :first]), 1)
        return torch.cat((held, held.new_zeros(held.shape[0], tokens, *held.shape[2:])), 1)

    return Window(opened(ring.k), opened(ring.v))


def commit_window(ring: SlidingCache, window: Window, position: int, tokens: int) -> SlidingCache:
    """A ring in which the newest `min(tokens, window)` entries of the call have taken their slots."""
    size = ring.k.shape[1]
    kept = min(tokens, size)
    slots = torch.arange(position + tokens - kept, position + tokens, device=ring.k.device) % size
    return SlidingCache(*(held.index_copy(1, slots, entries[:, -kept:]) for held, entries in zip(ring, window, strict=True)))


def blend(entries: torch.Tensor, old: int, index: torch.Tensor | None, new: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Entries of the rows `index [B, m]` moved towards `new [B, m, Hkv, hd]` by `gate [B, m, 1, 1]`, in the gate's dtype."""
    return moved(entries[:, old:] if index is None else entries.gather(1, _spread(index + old, entries)), new, gate)


def moved(held: torch.Tensor, new: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`held + gate (new - held)`, in the gate's dtype."""
    held = held.to(gate.dtype)
    return held + gate * (new.to(gate.dtype) - held)


def put(entries: torch.Tensor, old: int, index: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """Entries with those of the rows `index [B, m]` replaced by `new`, rounded to the cache's dtype."""
    new = new.to(entries.dtype)
    if index is None:
        return torch.cat((entries[:, :old], new), 1)
    return entries.scatter(1, _spread(index + old, entries), new)


def _spread(index: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    return index[..., None, None].expand(-1, -1, *entries.shape[2:])
