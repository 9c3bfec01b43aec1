"""What prepares attention, in the interpreter, against formulas in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.rotary_triton import attention_inputs, rotary_cos_sin, row_places
from tests.unit.kernels.step_cases import EPS, turned


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.mark.parametrize("three", [False, True])
@pytest.mark.parametrize("half", [1, 5, 32])
def test_tables(half: int, three: bool) -> None:
    """Positions of one part, and of three, of which each frequency follows one."""
    inv_freq = 1000.0 ** -torch.linspace(0, 1, half)
    positions = torch.tensor([[0, 1, 63, 4000], [5, 5, 2, 1], [9, 8, 7, 6]], dtype=torch.int32)
    parts = torch.arange(half) % 3
    angles = positions[parts].t().double() * inv_freq.double() if three else positions[0].double()[:, None] * inv_freq.double()
    cos, sin = rotary_cos_sin(positions if three else positions[0], inv_freq, 1.5, parts if three else None)
    torch.testing.assert_close(cos.double(), angles.cos() * 1.5, rtol=0, atol=1e-3)
    torch.testing.assert_close(sin.double(), angles.sin() * 1.5, rtol=0, atol=1e-3)


@pytest.mark.parametrize("norm", [None, "plain", "zero-centred"])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "half", "block_heads", "dtype"),
    [
        (1, 3, 1, 16, 8, None, torch.float32),
        (63, 6, 2, 16, 2, 4, torch.float32),
        (65, 9, 3, 12, 5, 2, torch.float32),
        (3, 4, 4, 64, 32, None, torch.float16),
    ],
)
def test_inputs(
    rows: int, heads: int, kv_heads: int, head_dim: int, half: int, block_heads: int | None, dtype: torch.dtype, norm: str | None
) -> None:
    """Every other place of the caches stays as it is; some rows are not written."""
    width = (heads + 2 * kv_heads) * head_dim
    qkv = random(rows, width + 8, dtype=dtype)
    q_norm, k_norm = (None, None) if norm is None else (random(head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    angles = random(rows, half, seed=3).double()
    blocks = -(-rows // 16) + 1
    k_cache, v_cache = random(2, blocks, 16, kv_heads, head_dim, dtype=dtype, seed=4).unbind(0)
    places = torch.randperm(blocks * 16, generator=torch.Generator().manual_seed(rows))[:rows]
    written = torch.arange(0, rows, 2) if rows > 1 else None
    chosen = places if written is None else places[written]
    k_after, v_after = k_cache.double(), v_cache.double()
    q = attention_inputs(
        qkv,
        angles.cos().float(),
        angles.sin().float(),
        k_cache,
        v_cache,
        row_places(chosen, written, rows),
        heads=heads,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=EPS,
        zero_centered=norm == "zero-centred",
        block_heads=block_heads,
    )
    all_heads = qkv[:, :width].unflatten(1, (-1, head_dim))
    expected = turned(all_heads[:, :heads], q_norm, angles, zero_centered=norm == "zero-centred")
    keys = turned(all_heads[:, heads : heads + kv_heads], k_norm, angles, zero_centered=norm == "zero-centred")
    rows_written = slice(None) if written is None else written
    k_after.flatten(0, 1)[chosen] = keys[rows_written]
    v_after.flatten(0, 1)[chosen] = all_heads[:, heads + kv_heads :].double()[rows_written]
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(q.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(k_cache.double(), k_after, rtol=tolerance, atol=tolerance)
    assert torch.equal(v_cache.double(), v_after)


def test_wrong_shapes_are_refused() -> None:
    cos = sin = random(2, 4)
    caches = random(2, 1, 16, 1, 8).unbind(0)
    with pytest.raises(ValueError, match="heads"):
        attention_inputs(random(2, 23), cos, sin, *caches, torch.zeros(2, dtype=torch.int64), heads=1)
    with pytest.raises(ValueError, match="both"):
        attention_inputs(random(2, 24), cos, sin, *caches, torch.zeros(2, dtype=torch.int64), heads=1, q_norm=random(8))
