"""Boxes inside tensors: what an index selects, and whether pieces tile a parameter. Plain integers, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np

from model.pieces import Index, Piece


def box(shape: Sequence[int], index: Index) -> list[range]:
    """The positions that an index selects in each dimension. Raises IndexError where it leaves the shape."""
    if len(index) > len(shape):
        raise IndexError(f"index {index} has more dimensions than {tuple(shape)}")
    ranges = []
    for dim, size in enumerate(shape):
        part = index[dim] if dim < len(index) else slice(None)
        if isinstance(part, slice):
            if (part.stop is not None and part.stop > size) or (part.start is not None and part.start > size):
                raise IndexError(f"index {index} leaves the shape {tuple(shape)}")
            ranges.append(range(*part.indices(size)))
        elif 0 <= part < size:
            ranges.append(range(part, part + 1))
        else:
            raise IndexError(f"index {index} leaves the shape {tuple(shape)}")
    return ranges


def selected_shape(shape: Sequence[int], index: Index) -> tuple[int, ...]:
    """The shape of `tensor[index]`: integers drop their dimension, slices keep it."""
    ranges = box(shape, index)
    return tuple(len(part) for dim, part in enumerate(ranges) if dim >= len(index) or isinstance(index[dim], slice))


def selected_places(piece: Piece) -> tuple[int, tuple[int, ...]]:
    """Where in its tensor what a piece reads begins, and the steps from element to element in each dimension of `read_shape`."""
    strides = [prod(piece.shape[dim + 1 :]) for dim in range(len(piece.shape))]
    ranges = box(piece.shape, piece.source)
    start = sum(part.start * stride for part, stride in zip(ranges, strides, strict=True))
    kept = [dim for dim in range(len(ranges)) if dim >= len(piece.source) or isinstance(piece.source[dim], slice)]
    steps = [ranges[dim].step * strides[dim] for dim in kept]
    return start, (*steps[:-2], *reversed(steps[-2:])) if piece.transpose else tuple(steps)


def read_shape(piece: Piece) -> tuple[int, ...]:
    """The shape of what a piece reads, after its transposition."""
    shape = selected_shape(piece.shape, piece.source)
    return (*shape[:-2], shape[-1], shape[-2]) if piece.transpose else shape


def tiling(shape: Sequence[int], pieces: Sequence[Piece]) -> tuple[int, bool]:
    """(rows covered, overlap): how many leading rows (first dimension) the pieces fill wholly, and whether two of them meet.

    Anything filled beyond those rows counts as not covered at all: the answer is -1 rows then. Cells between the pieces' borders
    stand for the elements within, so the work grows with the pieces and not with the parameter.
    """
    boxes = [box(shape, piece.target) for piece in pieces]
    if any(part.step != 1 for ranges in boxes for part in ranges):
        return -1, False
    cuts = [
        sorted({0, size, *(edge for ranges in boxes for edge in (ranges[dim].start, ranges[dim].stop))})
        for dim, size in enumerate(shape)
    ]
    place = [{edge: position for position, edge in enumerate(edges)} for edges in cuts]
    cells = np.zeros([len(edges) - 1 for edges in cuts], dtype=np.int32)
    for ranges in boxes:
        cells[tuple(slice(place[dim][part.start], place[dim][part.stop]) for dim, part in enumerate(ranges))] += 1
    if not shape:
        return int(cells), bool(cells > 1)
    if 0 in shape:
        return shape[0], False
    rows = cells.reshape(cells.shape[0], -1)
    full = [bool(row.all()) for row in rows]
    covered = 0
    for filled, (low, high) in zip(full, pairwise(cuts[0]), strict=True):
        if not filled:
            break
        covered += high - low
    below = full.index(False) if False in full else len(full)
    return (-1 if rows[below:].any() else covered), bool((cells > 1).any())
