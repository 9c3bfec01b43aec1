"""The paged attention kernels in the interpreter against softmax attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.paged_decode_triton import DecodeConfig, paged_decode
from kernels.paged_prefill_triton import PrefillConfig, paged_prefill, prefill_tiles
from tests.unit.kernels.attention_cases import PagedCase

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def check(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (got.double() - expected).norm() / expected.norm()
    assert float(error) < TOLERANCE[dtype]


@pytest.mark.parametrize("way", ["one part", "combined", "in turn"])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "window", "dtype"),
    [
        ([1], 3, 1, 16, None, torch.float32),
        ([63, 0, 65, 1], 3, 1, 16, None, torch.float16),
        ([65, 130], 6, 2, 64, None, torch.float32),
        ([130, 17, 33], 9, 3, 16, 20, torch.float32),
        ([100], 4, 4, 32, 1, torch.float32),
    ],
    ids=str,
)
def test_decode(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype, way: str
) -> None:
    """An idle span gives zeros; the gate is strided."""
    case = PagedCase(lengths, kv_heads, head_dim, dtype)
    q = case.random(len(lengths), heads, head_dim)
    gate = case.random(len(lengths), heads * head_dim + 8, seed=5)[:, 8:] if "turn" in way else None
    turns = torch.zeros(len(lengths) * kv_heads, dtype=torch.int32) if way == "in turn" else None
    got = paged_decode(
        q,
        case.k_cache,
        case.v_cache,
        case.tables,
        case.seq_lens,
        max_seq=max(lengths),
        window=window,
        gate=gate,
        turns=turns,
        config=DecodeConfig(tile=16, splits=1 if way == "one part" else 3),
    )
    expected = torch.zeros(got.shape, dtype=torch.float64)
    for number, length in enumerate(lengths):
        if length:
            expected[number] = case.attend(number, q[number : number + 1], window)[0]
    if gate is not None:
        expected *= gate.double().sigmoid()
    check(got, expected, dtype)
    assert turns is None or not turns.any()


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_verify_rows(window: int | None, in_turn: bool) -> None:
    """A few rows of chosen spans; rows of the others stay as they are."""
    lengths, counts = [70, 40, 5, 33], [3, 9, 2, 4]
    case = PagedCase(lengths, 2, 16, torch.float32)
    query_start = torch.tensor([0, 3, 12, 14, 18], dtype=torch.int32)
    q = case.random(18, 6, 16)
    out = torch.full((18, 96), 7.0)
    chosen = [3, 0, 2]
    turns = torch.zeros(6, dtype=torch.int32) if in_turn else None
    paged_decode(
        q,
        case.k_cache,
        case.v_cache,
        case.tables,
        case.seq_lens,
        max_seq=70,
        window=window,
        out=out,
        query_start=query_start,
        spans=torch.tensor(chosen),
        max_rows=4,
        turns=turns,
        config=DecodeConfig(tile=16, splits=2),
    )
    for number, (start, count) in enumerate(zip(query_start.tolist(), counts, strict=False)):
        rows = slice(start, start + count)
        if number in chosen:
            check(out[rows], case.attend(number, q[rows], window), torch.float32)
        else:
            assert bool((out[rows] == 7.0).all())


@pytest.mark.parametrize(
    ("lengths", "counts", "heads", "kv_heads", "head_dim", "window", "packed", "dtype"),
    [
        ([63], [63], 3, 1, 16, None, 16, torch.float32),
        ([65, 1, 40], [65, 1, 7], 6, 2, 64, None, 64, torch.float16),
        ([130, 33], [65, 33], 9, 3, 16, 20, 32, torch.float32),
        ([70, 100], [70, 3], 2, 2, 16, 1, 16, torch.float32),
        ([100], [40], 8, 1, 16, 33, 16, torch.float32),
    ],
    ids=str,
)
def test_prefill(
    lengths: list[int],
    counts: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    packed: int,
    dtype: torch.dtype,
) -> None:
    """Spans of any number of rows, whole prompts and later pieces, in one launch; a span without tiles stays as it is."""
    lengths, counts = [*lengths, 5], [*counts, 2]
    case = PagedCase(lengths, kv_heads, head_dim, dtype)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    q = case.random(int(starts[-1]), heads, head_dim)
    gate = case.random(int(starts[-1]), heads * head_dim + 8, seed=5)[:, 8:] if window is None else None
    config = PrefillConfig(packed=packed, tile=16)
    tiles = prefill_tiles(starts, np.array(lengths), range(len(lengths) - 1), config.tile_rows(heads // kv_heads))
    out = torch.full((int(starts[-1]), heads * head_dim), 7.0, dtype=dtype)
    paged_prefill(
        q,
        case.k_cache,
        case.v_cache,
        case.tables,
        torch.from_numpy(starts),
        case.seq_lens,
        torch.from_numpy(tiles),
        window=window,
        gate=gate,
        out=out,
        config=config,
    )
    for number, start in enumerate(starts[:-2].tolist()):
        rows = slice(start, start + counts[number])
        expected = case.attend(number, q[rows], window)
        check(out[rows], expected if gate is None else expected * gate[rows].double().sigmoid(), dtype)
    assert bool((out[-2:] == 7.0).all())


def test_blocks_longer_than_tiles() -> None:
    """Three blocks of 32 positions, in no order, in tiles of 16."""
    case = PagedCase([70], 2, 16, torch.float32)
    caches = []
    for kept in (case.keys[0], case.values[0]):
        cache = torch.full((96, 2, 16), torch.nan)
        cache[:70] = kept
        caches.append(cache.unflatten(0, (3, 32))[[1, 2, 0]].contiguous())
    q = case.random(40, 4, 16)
    config = PrefillConfig(packed=16, tile=16)
    starts = np.array([0, 40], dtype=np.int32)
    tiles = torch.from_numpy(prefill_tiles(starts, np.array([70]), [0], config.tile_rows(2)))
    tables = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    k_cache, v_cache = caches
    got = paged_prefill(q, k_cache, v_cache, tables, torch.from_numpy(starts), case.seq_lens, tiles, config=config)
    check(got, case.attend(0, q, None), torch.float32)


def test_tiles_are_ordered_by_work() -> None:
    tiles = prefill_tiles(np.array([0, 5, 6, 10]), np.array([5, 300, 100]), [0, 2], 2)
    assert tiles.tolist() == [[2, 2], [2, 0], [0, 4], [0, 2], [0, 0]]
    assert prefill_tiles(np.array([0, 1]), np.array([9]), [], 4).shape == (0, 2)
