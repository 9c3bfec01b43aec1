"""The norm kernels in the interpreter against formulas in float64, and against the torch references."""

from __future__ import annotations

import pytest
import torch

from kernels.pairs import Pairs
from kernels.rms_norm import rms_norm, zero_centered_rms_norm
from kernels.rms_norm_triton import add_norm_rows, norm_rows, silu_mul

SHAPES = [(1, 16), (63, 48), (65, 129), (3, 2048), (0, 32)]
EPS = 1e-3


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def normed(x: torch.Tensor, weight: torch.Tensor, *, zero_centered: bool) -> torch.Tensor:
    """In float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight.double() + (1.0 if zero_centered else 0.0))


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 1e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm(shape: tuple[int, int], zero_centered: bool, dtype: torch.dtype) -> None:
    """Rows of a wider matrix."""
    x, weight = random(shape[0], shape[1] + 8, dtype=dtype)[:, 8:], random(shape[1], dtype=dtype, seed=2)
    got = norm_rows(x, weight, EPS, zero_centered=zero_centered)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), normed(x, weight, zero_centered=zero_centered), **tolerance(dtype))
    reference = zero_centered_rms_norm if zero_centered else rms_norm
    torch.testing.assert_close(got, reference(x, weight, EPS), **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_and_norm(shape: tuple[int, int], shared: bool, dtype: torch.dtype) -> None:
    """The sum is rounded once, kept in x, and what is normalised."""
    x, delta, weight = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1), random(shape[1], dtype=dtype, seed=2)
    extra = random(*shape, dtype=dtype, seed=3) if shared else None
    gate = random(shape[0], 1, dtype=dtype, seed=4) if shared else None
    total = x.double() + delta.double()
    if extra is not None and gate is not None:
        total += gate.double().sigmoid() * extra.double()
    kept = x.clone()
    got = add_norm_rows(kept, delta, weight, EPS, zero_centered=True, shared=extra, shared_gate=gate)
    torch.testing.assert_close(kept.double(), total, **tolerance(dtype))
    torch.testing.assert_close(got.double(), normed(kept, weight, zero_centered=True), **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_are_summed_and_added(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """As if somebody else had made the sum, in the order of the choices; what another rank holds is not read."""
    rows, width = shape
    value, x, weight = random(rows, 5, width, dtype=dtype), random(*shape, dtype=dtype, seed=1), random(width, dtype=dtype, seed=2)
    experts = (torch.arange(rows)[:, None] + torch.arange(5)).remainder(6).to(torch.int32)
    local = torch.tensor([0, -1, 1, 2, -1, 3])
    foreign = (local[experts.long()] < 0)[:, :, None]
    delta = torch.zeros(shape)
    for choice in range(5):
        delta += value[:, choice].float().masked_fill(foreign[:, choice], 0)
    expected, got = x.clone(), x.clone()
    pairs = Pairs(value.masked_fill(foreign, float("nan")).view(-1, width), experts, local)
    assert torch.equal(add_norm_rows(got, pairs, weight, EPS), add_norm_rows(expected, delta.to(dtype), weight, EPS))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", [(1, 8), (63, 96), (2, 1100)], ids=str)
def test_silu_mul(shape: tuple[int, int]) -> None:
    gate_up = random(shape[0], 2 * shape[1])
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(silu_mul(gate_up).double(), gate / (1 + (-gate).exp()) * up, rtol=1e-5, atol=1e-6)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        norm_rows(random(2, 8), random(9), EPS)
    with pytest.raises(ValueError, match="added"):
        add_norm_rows(random(2, 8), random(2, 9), random(8), EPS)
    with pytest.raises(ValueError, match="at most 32"):
        Pairs(random(66, 8), torch.zeros(2, 33), torch.zeros(1))
    with pytest.raises(ValueError, match="outputs for 2 rows"):
        Pairs(random(7, 8), torch.zeros(2, 3), torch.zeros(1))
    with pytest.raises(ValueError, match="belong together"):
        add_norm_rows(random(2, 8), random(2, 8), random(8), EPS, shared=random(2, 8))
