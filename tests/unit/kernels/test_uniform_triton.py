"""Dummy values from the kernel, in the interpreter, against the torch form, which tests/unit/loading holds."""

from __future__ import annotations

import pytest
import torch

from kernels.uniform_triton import fill_uniform
from model.loading.geometry import read_shape, selected_places
from model.loading.sources import SCALE, DummySource
from model.pieces import Index, Piece

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
"""The interpreter cuts bfloat16 off, where devices round."""
SHAPE = (6, 10, 7)


def filled(piece: Piece, target: torch.Tensor) -> bool:
    start, strides = selected_places(piece)
    return fill_uniform(target, start, strides, DummySource(3, DEVICE)._key(piece), SCALE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "source", "transpose"),
    [
        ((), (), False),
        ((5000,), (), False),
        (SHAPE, (), False),
        (SHAPE, (slice(1, 4),), False),
        (SHAPE, (2,), False),
        (SHAPE, (2, slice(3, 9)), False),
        (SHAPE, (slice(None), 4), False),
        (SHAPE, (1, slice(0, 10, 3), slice(2, 6)), False),
        (SHAPE, (slice(2, 2),), False),
        (SHAPE, (), True),
        (SHAPE, (2,), True),
        (SHAPE, (2, slice(3, 9)), True),
    ],
    ids=str,
)
def test_values_are_those_of_the_torch_form(shape: tuple[int, ...], source: Index, transpose: bool, dtype: torch.dtype) -> None:
    piece = Piece(name="w", shape=shape, source=source, transpose=transpose)
    value = DummySource(3, torch.device("cpu")).read(piece)
    value = value.mT if transpose else value
    assert value.shape == read_shape(piece)
    target = torch.full(value.shape, 7.0, dtype=dtype, device=DEVICE)
    if filled(piece, target):
        assert torch.equal(target.cpu(), value.to(dtype))
    else:
        assert value.dim() == 3, "rows of columns are a kernel's"
        assert bool((target == 7.0).all())


def test_a_part_of_a_parameter_is_filled_and_nothing_else() -> None:
    piece = Piece(name="w", shape=(4, 30), source=(slice(1, 4), slice(5, 25)))
    whole = torch.full((9, 64), 7.0, device=DEVICE)
    assert filled(piece, whole[2:5, 8:28])
    expected = torch.full((9, 64), 7.0)
    expected[2:5, 8:28] = DummySource(3, torch.device("cpu")).read(piece)
    assert torch.equal(whole.cpu(), expected)


def test_places_of_a_huge_tensor_and_keys_near_the_end_wrap() -> None:
    """The last places of a tensor with more than 2^31, whose sum with the key passes 2^63."""
    target = torch.zeros(4, device=DEVICE)
    key = (1 << 63) - (1 << 32) - 2
    assert fill_uniform(target, 1 << 32, (1,), key, SCALE)
    place = torch.tensor([(1 << 63) - 2, (1 << 63) - 1, -(1 << 63), 1 - (1 << 63)], dtype=torch.int64)
    place = place * -0x61C8864680B583EB
    place = (place ^ (place >> 30)) * -0x40A7B892E31B1A47
    place = (place ^ (place >> 27)) * -0x6B2FB644ECCEEE15
    assert torch.equal(target.cpu(), (place >> 40).float() * SCALE)
