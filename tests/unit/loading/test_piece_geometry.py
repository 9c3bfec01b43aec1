"""Boxes and tilings, against numpy's own indexing."""

from __future__ import annotations

import numpy as np
import pytest

from model.loading.geometry import read_shape, selected_shape, tiling
from model.pieces import Index, Piece


@pytest.mark.parametrize(
    "index",
    [(), (slice(1, 3),), (2,), (slice(None), 1), (1, slice(0, 2), 0), (slice(0, 4, 2),), (slice(2, 2),), (slice(-2, None),)],
)
def test_selected_shape_is_numpys(index: Index) -> None:
    assert selected_shape((4, 3, 5), index) == np.empty((4, 3, 5))[index].shape


@pytest.mark.parametrize("index", [(slice(0, 5),), (4,), (slice(5, 6),), (0, 0, 0, 0), (-1,)])
def test_an_index_that_leaves_the_shape_is_refused(index: Index) -> None:
    with pytest.raises(IndexError):
        selected_shape((4, 3, 5), index)


def test_transposition_swaps_the_last_two() -> None:
    piece = Piece(name="x", shape=(6, 3, 5), source=(slice(0, 2),), transpose=True)
    assert read_shape(piece) == np.empty((6, 3, 5))[0:2].swapaxes(-1, -2).shape


def piece(*target: slice | int) -> Piece:
    return Piece(name="x", shape=(1,), target=target)


@pytest.mark.parametrize(
    ("shape", "pieces", "expected"),
    [
        ((4, 6), [piece()], (4, False)),
        ((4, 6), [], (0, False)),
        ((4, 6), [piece(slice(0, 3))], (3, False)),
        ((4, 6), [piece(slice(1, 4))], (-1, False)),
        ((2, 6), [piece(0, slice(0, 3)), piece(0, slice(3, 6)), piece(1)], (2, False)),
        ((2, 6), [piece(0, slice(0, 3)), piece(0, slice(3, 6)), piece(1, slice(0, 3))], (-1, False)),
        ((2, 6), [piece(0, slice(0, 4)), piece(0, slice(3, 6))], (1, True)),
        ((2, 6), [piece(slice(None), slice(0, 6, 2))], (-1, False)),
        ((), [piece()], (1, False)),
        ((0, 4), [], (0, False)),
        ((3, 4), [piece(0), piece(2)], (-1, False)),
    ],
)
def test_tiling(shape: tuple[int, ...], pieces: list[Piece], expected: tuple[int, bool]) -> None:
    assert tiling(shape, pieces) == expected


def test_tiling_of_random_boxes_agrees_with_counting_elements() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        shape = tuple(int(size) for size in random.integers(1, 5, size=2))
        pieces, counts = [], np.zeros(shape, dtype=int)
        for _ in range(random.integers(0, 4)):
            edges = [sorted(random.integers(0, size + 1, size=2).tolist()) for size in shape]
            index = tuple(slice(low, high) for low, high in edges)
            pieces.append(piece(*index))
            counts[index] += 1
        full = (counts > 0).all(axis=1)
        rows = next((row for row, filled in enumerate(full) if not filled), len(full))
        expected = -1 if counts[rows:].any() else rows
        assert tiling(shape, pieces) == (expected, bool((counts > 1).any())), (shape, pieces)
