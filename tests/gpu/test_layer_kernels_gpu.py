"""The layer kernels on a GPU in bfloat16 and float32, at the sizes of real models, against formulas in float64; and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kernels.delta_chunk_triton import delta_pieces
from kernels.delta_decode_triton import MANY_ENTRIES, DeltaWeights, default_delta_decode_config, delta_decode
from kernels.delta_plan import delta_plan
from kernels.paged_decode_triton import DecodeConfig, paged_decode
from kernels.paged_prefill_triton import default_prefill_config, paged_prefill, prefill_tiles
from kernels.paged_step_triton import StepConfig, attention_step
from kernels.rms_norm_triton import add_norm_rows, norm_rows
from model.batch import ForwardBatch
from tests.unit.kernels.attention_cases import BLOCK, PagedCase
from tests.unit.kernels.delta_cases import DeltaCase
from tests.unit.kernels.step_cases import StepCase

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
SHAPES = [(32, 4, 128, None), (16, 2, 256, None), (9, 3, 64, 100)]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("way", ["one part", "combined", "in turn"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window"), SHAPES)
def test_decode(heads: int, kv_heads: int, head_dim: int, window: int | None, way: str, dtype: torch.dtype) -> None:
    """An idle span gives zeros; repeated calls give the same bits."""
    lengths = [1, 63, 0, 65, 1000, 130]
    case = PagedCase(lengths, kv_heads, head_dim, dtype, "cuda")
    q = case.random(len(lengths), heads, head_dim)
    gate = case.random(len(lengths), heads * head_dim + 8, seed=5)[:, 8:]
    turns = torch.zeros(len(lengths) * kv_heads, dtype=torch.int32, device="cuda") if way == "in turn" else None

    def run() -> torch.Tensor:
        return paged_decode(
            q,
            case.k_cache,
            case.v_cache,
            case.tables,
            case.seq_lens,
            max_seq=1000,
            window=window,
            gate=gate,
            turns=turns,
            config=DecodeConfig(tile=32, stages=2, splits=1 if way == "one part" else 5),
        )

    expected = torch.zeros(len(lengths), heads * head_dim, dtype=torch.float64)
    for number, length in enumerate(lengths):
        if length:
            expected[number] = case.attend(number, q[number : number + 1], window)[0]
    got = run()
    assert error(got, expected * gate.cpu().double().sigmoid()) < TOLERANCE[dtype]
    assert not got[2].any()
    assert torch.equal(got, graphed(run))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("splits", [None, 1, 5])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half", "options"),
    [
        (16, 2, 128, 64, {}),
        (8, 1, 256, 32, {"gated": True, "norm": "zero-centred"}),
        (9, 3, 64, 32, {"window": 100, "norm": None}),
        (16, 1, 128, 64, {}),
        (2, 2, 64, 8, {}),
    ],
    ids=str,
)
def test_attention_step(
    heads: int, kv_heads: int, head_dim: int, half: int, options: dict[str, Any], splits: int | None, dtype: torch.dtype
) -> None:
    """Idle rows, rows that find their key in the cache, repeated calls and dependent launches: the same bits."""
    case = StepCase([1, 63, 0, 65, 1000, 130], heads, kv_heads, head_dim, half, dtype, cached=(3,), device="cuda", **options)
    k_cache, v_cache = case.paged.k_cache.clone(), case.paged.v_cache.clone()
    arguments: dict[str, Any] = case.arguments(k_cache, v_cache)
    turns = torch.zeros(6 * kv_heads, dtype=torch.int32, device="cuda")
    tile = 16 if dtype == torch.float32 else 32
    config = None if splits is None else StepConfig(tile=tile, warps=4, stages=2, splits=splits, alone=tile)

    def run(pdl: bool) -> torch.Tensor:
        return attention_step(**arguments, turns=turns, config=config, pdl=pdl)

    got = run(False)
    expected, k_after, v_after = case.expected()
    assert error(got, expected) < TOLERANCE[dtype]
    assert not got[2].any()
    assert error(k_cache, k_after) < TOLERANCE[dtype]
    assert torch.equal(v_cache.cpu().double(), v_after)
    assert torch.equal(got, graphed(lambda: run(True)))
    assert not turns.any()


def graphed(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of a captured call."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window"), [*SHAPES, (12, 4, 128, None), (2, 2, 64, None)])
def test_prefill(heads: int, kv_heads: int, head_dim: int, window: int | None, gated: bool, dtype: torch.dtype) -> None:
    """Whole prompts and later pieces of any number of rows; the same bits each time; nothing past a sequence's end is seen."""
    lengths, counts = [63, 700, 65, 300, 128, 129, 1, 17], [63, 200, 1, 300, 128, 2, 1, 17]
    case = PagedCase(lengths, kv_heads, head_dim, dtype, "cuda")
    for number, length in enumerate(lengths):
        if length % BLOCK:
            for cache in (case.k_cache, case.v_cache):
                cache[int(case.tables[number, length // BLOCK]), length % BLOCK :] = torch.nan
    starts = np.cumsum([0, *counts]).astype(np.int32)
    q = case.random(int(starts[-1]), heads, head_dim)
    gate = case.random(int(starts[-1]), heads * head_dim + 8, seed=5)[:, 8:] if gated else None
    spans = range(len(counts))
    starts_on_device = torch.from_numpy(starts).cuda()
    config = default_prefill_config(head_dim, dtype)
    tiles = torch.from_numpy(prefill_tiles(starts, np.array(lengths), spans, config.tile_rows(heads // kv_heads))).cuda()
    run = partial(
        paged_prefill, q, case.k_cache, case.v_cache, case.tables, starts_on_device, case.seq_lens, tiles,
        window=window, gate=gate, config=config,
    )  # fmt: skip
    got = run(out=torch.full((q.shape[0], heads * head_dim), torch.nan, dtype=dtype, device="cuda"))
    for number in spans:
        rows = slice(int(starts[number]), int(starts[number + 1]))
        expected = case.attend(number, q[rows], window)
        assert error(got[rows], expected if gate is None else expected * gate[rows].cpu().double().sigmoid()) < TOLERANCE[dtype]
    assert torch.equal(got, graphed(run))


@pytest.mark.parametrize("counts", [[1, 1, 1], [63, 1, 130]], ids=str)
@pytest.mark.parametrize("entries", [1, MANY_ENTRIES])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_delta(counts: list[int], entries: int, size: int, dtype: torch.dtype) -> None:
    """Steps, as configured for so many entries, and pieces; states in float32."""
    case = DeltaCase(4, 8, size, size, 4, slots=4, dtype=dtype, device="cuda")
    starts = np.cumsum([0, *counts])
    projected = case.projection(int(starts[-1]))
    slots = torch.tensor([2, 0, 3], dtype=torch.int32, device="cuda")
    conv, h = case.conv.clone(), case.h.clone()
    weights = DeltaWeights(case.weight, case.a_log, case.dt_bias, case.norm, 1e-6)
    if max(counts) == 1:
        turns = torch.zeros(12, dtype=torch.int32, device="cuda")
        config = default_delta_decode_config(size, size, entries)
        out = delta_decode(projected, conv, h, slots, weights, turns, key_heads=4, config=config)
    else:
        out = delta_pieces(projected, conv, h, slots, weights, delta_plan(starts, range(3), "cuda"), key_heads=4)
    for number, slot in enumerate(slots.tolist()):
        rows = slice(int(starts[number]), int(starts[number + 1]))
        expected, conv_after, h_after = case.run(projected[rows], slot, 1e-6)
        assert error(out[rows], expected) < TOLERANCE[dtype]
        assert torch.equal(conv[slot].cpu().double(), conv_after)
        assert error(h[slot], h_after) < TOLERANCE[dtype]
    assert torch.equal(h[1], case.h[1])


def test_chain_with_dependent_launches() -> None:
    """Kernels that may start early still see what the kernel before wrote: a chain of norms equals the chain without."""
    x = torch.randn(5, 2048, device="cuda").to(torch.bfloat16)
    weight = torch.randn(2048, device="cuda").to(torch.bfloat16)

    def chain(pdl: bool) -> torch.Tensor:
        kept = x.clone()
        delta = x
        for _ in range(50):
            delta = add_norm_rows(kept, delta, weight, 1e-6, pdl=pdl)
        return kept + delta

    chain(True)
    assert torch.equal(chain(False), graphed(lambda: chain(True)))


def test_delta_with_dependent_launches() -> None:
    """Steps that load their states before the kernel ahead of them ends see what that writes, and what the last step wrote."""
    case = DeltaCase(4, 8, 128, 128, 4, slots=4, dtype=torch.bfloat16, device="cuda")
    projected = case.projection(3)
    slots = torch.tensor([2, -1, 3], dtype=torch.int32, device="cuda")
    weights = DeltaWeights(case.weight, case.a_log, case.dt_bias, case.norm, 1e-6)
    one = torch.ones(projected.shape[1], dtype=torch.bfloat16, device="cuda")
    turns = torch.zeros(12, dtype=torch.int32, device="cuda")

    def steps(pdl: bool) -> torch.Tensor:
        conv, h = case.conv.clone(), case.h.clone()
        outputs = []
        for number in range(20):
            rows = norm_rows(projected * (1 + number), one, 1e-6, pdl=pdl)
            rows = norm_rows(rows, one, 1e-6, pdl=pdl)
            outputs.append(delta_decode(rows, conv, h, slots, weights, turns, key_heads=4, pdl=pdl))
        return torch.cat([*(output.flatten().float() for output in outputs), conv.flatten().float(), h.flatten()])

    steps(True)
    assert torch.equal(steps(False), graphed(lambda: steps(True)))
    assert not turns.any()


def test_a_batch_goes_to_a_device_that_is_busy() -> None:
    """Making the largest batch does not wait for what the device was given before: else it would idle until the batch is there."""

    def make() -> ForwardBatch:
        rows = torch.zeros(8192, dtype=torch.int64, device="cuda")
        tables = [list(range(64 * span, 64 * span + 64)) for span in range(8)]
        lengths, spans = [1024] * 8, range(8)
        given = {"block_tables": tables, "kv_write_from": [0] * 8, "wanted_rows": [8191], "token_ids": rows}
        return ForwardBatch.from_spans(query_lens=lengths, seq_lens=lengths, slots=spans, block_size=16, device="cuda", **given)

    expected = torch.arange(8192)
    assert torch.equal(make().kv_places.cpu(), expected)  # the first one also takes the memory
    passed = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    passed.record()
    batch = make()
    assert not passed.query()
    assert torch.equal(batch.kv_places.cpu(), expected)
