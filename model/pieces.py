"""How a parameter of a model is assembled from tensors of a checkpoint: plain data between families and the loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Index = tuple[slice | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One read: `parameter[target] = transpose?(tensor[source])`, where `tensor` is named `name` and has `shape` on disk.

    An empty `source` or `target` means all of it. `transpose` swaps the last two dimensions of what was read.
    """

    name: str
    shape: tuple[int, ...]
    source: Index = ()
    target: Index = ()
    transpose: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMap:
    """All of a rank's reads, parameter by parameter, and which other tensors a folder may hold unread.

    `pieces[p]` covers parameter `p` wholly. `ignored` are name prefixes of tensors that this runtime knows and leaves (multi-token
    prediction, vision tower, rotary buffers); `foreign` are full names that other ranks read, so that a surplus can be told apart.
    `neutral` are parameters that dummy weights fill with one value, beside the norms that are known by their modules.
    """

    pieces: dict[str, tuple[Piece, ...]]
    ignored: tuple[str, ...] = ()
    foreign: frozenset[str] = frozenset()
    neutral: Mapping[str, float] = field(default_factory=dict)
