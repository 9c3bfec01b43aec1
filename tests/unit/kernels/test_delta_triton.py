"""Gated DeltaNet's kernels in the interpreter against its formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.delta_chunk_triton import DeltaChunkConfig, delta_pieces
from kernels.delta_decode_triton import DeltaDecodeConfig, DeltaWeights, delta_decode
from kernels.delta_plan import delta_plan
from tests.unit.kernels.delta_cases import DeltaCase


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return float((got.double() - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_dim", "value_dim", "taps", "config", "dtype"),
    [
        (1, 1, 16, 16, 4, None, torch.float32),
        (1, 3, 16, 32, 4, DeltaDecodeConfig(warps=2, columns=16), torch.float32),
        (3, 6, 32, 16, 2, DeltaDecodeConfig(warps=4), torch.float16),
        (2, 4, 16, 16, 3, DeltaDecodeConfig(warps=4, columns=8), torch.float32),
    ],
)
def test_decode(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    taps: int,
    config: DeltaDecodeConfig | None,
    dtype: torch.dtype,
) -> None:
    """Some rows of a batch, in any order of slots, one of them idle; other slots and rows stay as they are."""
    case = DeltaCase(key_heads, value_heads, key_dim, value_dim, taps, slots=5, dtype=dtype)
    projected = case.projection(6)
    slots, rows = [3, -1, 0], [5, 2, 1]
    conv, h = case.conv.clone(), case.h.clone()
    turns = torch.zeros(3 * key_heads, dtype=torch.int32)
    out = torch.full((6, value_heads * value_dim), 7.0, dtype=dtype)
    delta_decode(
        projected,
        conv,
        h,
        torch.tensor(slots, dtype=torch.int32),
        DeltaWeights(case.weight, case.a_log, case.dt_bias, case.norm, 1e-3),
        turns,
        key_heads=key_heads,
        rows=torch.tensor(rows),
        out=out,
        config=config,
    )
    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    for slot, row in zip(slots, rows, strict=True):
        if slot < 0:
            assert not out[row].any()
            continue
        expected, conv_after, h_after = case.run(projected[row : row + 1], slot, 1e-3)
        assert close(out[row], expected[0], tolerance)
        assert torch.equal(conv[slot].double(), conv_after)
        assert close(h[slot], h_after, tolerance)
    for slot in (1, 2, 4):
        assert torch.equal(conv[slot], case.conv[slot])
        assert torch.equal(h[slot], case.h[slot])
    assert bool((out[[0, 3, 4]] == 7.0).all())
    assert not turns.any()


@pytest.mark.parametrize(
    ("counts", "key_heads", "value_heads", "key_dim", "value_dim", "taps", "tile", "dtype"),
    [
        ([1], 1, 1, 16, 16, 4, 16, torch.float32),
        ([63, 1, 2, 130], 1, 3, 16, 32, 4, 16, torch.float32),
        ([65, 64], 2, 2, 32, 16, 2, 16, torch.float16),
        ([2, 128, 5], 1, 2, 16, 16, 3, 16, torch.float32),
        ([7, 70, 9], 1, 1, 16, 16, 9, 16, torch.float32),
    ],
    ids=str,
)
def test_pieces(
    counts: list[int], key_heads: int, value_heads: int, key_dim: int, value_dim: int, taps: int, tile: int, dtype: torch.dtype
) -> None:
    """Spans of any number of rows with carried states, in one call; a span that is not in the plan keeps its state."""
    counts = [*counts, 3]
    case = DeltaCase(key_heads, value_heads, key_dim, value_dim, taps, slots=6, dtype=dtype)
    starts = np.cumsum([0, *counts])
    projected = case.projection(int(starts[-1]))
    slots = [4, 2, 5, 0, 1][: len(counts)]
    conv, h = case.conv.clone(), case.h.clone()
    out = torch.full((int(starts[-1]), value_heads * value_dim), 7.0, dtype=dtype)
    delta_pieces(
        projected,
        conv,
        h,
        torch.tensor(slots, dtype=torch.int32),
        DeltaWeights(case.weight, case.a_log, case.dt_bias, case.norm, 1e-3),
        delta_plan(starts, range(len(counts) - 1), "cpu"),
        key_heads=key_heads,
        out=out,
        config=DeltaChunkConfig(tile=tile),
    )
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    for number, slot in enumerate(slots[:-1]):
        rows = slice(int(starts[number]), int(starts[number + 1]))
        expected, conv_after, h_after = case.run(projected[rows], slot, 1e-3)
        assert close(out[rows], expected, tolerance)
        assert torch.equal(conv[slot].double(), conv_after)
        assert close(h[slot], h_after, tolerance)
    for slot in sorted({0, 1, 2, 3, 4, 5} - set(slots[:-1])):
        assert torch.equal(conv[slot], case.conv[slot])
        assert torch.equal(h[slot], case.h[slot])
    assert bool((out[-3:] == 7.0).all())


def test_a_convolution_over_more_rows_is_refused() -> None:
    case = DeltaCase(1, 1, 16, 16, 10, slots=1, dtype=torch.float32)
    weights = DeltaWeights(case.weight, case.a_log, case.dt_bias, case.norm, 1e-3)
    plan = delta_plan(np.array([0, 2]), range(1), "cpu")
    with pytest.raises(ValueError, match="at most 9"):
        delta_pieces(case.projection(2), case.conv, case.h, torch.zeros(1, dtype=torch.int32), weights, plan, key_heads=1)
