"""Three-part rotary positions (temporal, height, width) of a prompt with images. No torch.

Source: the multimodal rotary embedding of Qwen2-VL (arXiv 2409.12191) as Qwen3-VL and Qwen3.5 use it. A text row has three equal
parts, one more than the largest before it. The rows of a grid share the temporal part, and add their place in the grid to it for
the other two. What follows goes on after the larger side of the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Grid(Protocol):
    """Rows `start .. start + height * width - 1` of a prompt."""

    @property
    def start(self) -> int:
        """Position of its first row."""
        ...

    @property
    def height(self) -> int:
        """Rows of the grid."""
        ...

    @property
    def width(self) -> int:
        """Columns of the grid."""
        ...


def rotary_positions(grids: Sequence[Grid], start: int, stop: int) -> np.ndarray:
    """`[3, stop - start]` int32 for rows `start .. stop - 1` of a sequence; `grids` are all of its prompt's, in order."""
    out = np.empty((3, stop - start), dtype=np.int32)
    shift, text = 0, 0
    for grid in grids:
        end = grid.start + grid.height * grid.width
        _text(out, start, text, grid.start, shift)
        low, high = max(grid.start, start), min(end, stop)
        if low < high:
            index = np.arange(low - grid.start, high - grid.start)
            base = grid.start + shift
            out[:, low - start : high - start] = base
            out[1, low - start : high - start] += (index // grid.width).astype(np.int32)
            out[2, low - start : high - start] += (index % grid.width).astype(np.int32)
        shift += max(grid.height, grid.width) - grid.height * grid.width
        text = end
    _text(out, start, text, stop, shift)
    return out


def position_shift(grids: Sequence[Grid]) -> int:
    """What is added to the place of a row behind all grids to give its position; never positive."""
    return sum(max(grid.height, grid.width) - grid.height * grid.width for grid in grids)


def _text(out: np.ndarray, start: int, low: int, high: int, shift: int) -> None:
    """Text rows `low .. high - 1`, as far as `out`, which begins at row `start`, has them."""
    low, high = max(low, start), min(high, start + out.shape[1])
    if low < high:
        out[:, low - start : high - start] = np.arange(low + shift, high + shift, dtype=np.int32)
