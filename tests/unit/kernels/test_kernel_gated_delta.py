"""The gated delta rule: steps and chunks against the recurrence written out in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gated_delta import delta_chunks, delta_gate, delta_inputs, delta_step

ROWS = (1, 2, 63, 64, 65, 130)


def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, h: torch.Tensor):
    """h <- a h + beta k (v - (a h)^T k)^T; o = h^T q, for each head and row, in float64."""
    q, k, v, g, beta, h = (x.double() for x in (q, k, v, g, beta, h.clone()))
    out = torch.zeros_like(v)
    for row in range(v.shape[0]):
        for head in range(v.shape[1]):
            h[head] *= g[row, head].exp()
            wrong = v[row, head] - h[head].T @ k[row, head]
            h[head] += beta[row, head] * torch.outer(k[row, head], wrong)
            out[row, head] = h[head].T @ q[row, head]
    return out, h


def inputs(rows: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, decay: float):
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k = delta_inputs(random(rows, key_heads, key_dim), random(rows, key_heads, key_dim), value_heads)
    g, beta = -decay * random(rows, value_heads).abs(), random(rows, value_heads).sigmoid()
    return q, k, random(rows, value_heads, value_dim), g, beta, random(value_heads, key_dim, value_dim)


@pytest.mark.parametrize("decay", [0.0, 0.1, 20.0])
@pytest.mark.parametrize(("key_heads", "value_heads", "key_dim", "value_dim"), [(1, 1, 4, 4), (3, 3, 8, 12), (2, 6, 16, 5)])
@pytest.mark.parametrize("rows", ROWS)
def test_chunks(rows: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, decay: float) -> None:
    values = inputs(rows, key_heads, value_heads, key_dim, value_dim, decay)
    expected, state = recurrence(*values)
    got, after = delta_chunks(*values)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.double(), state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 63])
def test_steps(rows: int) -> None:
    """Two sequences at a time, each its own."""
    q, k, v, g, beta, h = inputs(2 * rows, 3, 3, 8, 12, 0.1)
    first, second = slice(0, rows), slice(rows, None)
    expected, states = zip(
        *(recurrence(q[part], k[part], v[part], g[part], beta[part], h) for part in (first, second)), strict=True
    )
    state = torch.stack((h, h))
    for row in range(rows):
        at = torch.tensor([row, rows + row])
        got, state = delta_step(q[at], k[at], v[at], g[at], beta[at], state)
        torch.testing.assert_close(got.double(), torch.stack([out[row] for out in expected]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), torch.stack(states), rtol=1e-4, atol=1e-5)


def test_inputs_and_gate() -> None:
    q, k = torch.randn(2, 5, 2, 8, generator=torch.Generator().manual_seed(3)).unbind(0)
    scaled, unit = delta_inputs(q, k, 6)
    for head in range(6):
        raw = q[:, head // 3].double()
        norm = (raw.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(scaled[:, head].double(), raw / norm / 8**0.5, rtol=1e-5, atol=1e-6)
        raw = k[:, head // 3].double()
        torch.testing.assert_close(
            unit[:, head].double(), raw / (raw.square().sum(-1, keepdim=True) + 1e-6).sqrt(), rtol=1e-5, atol=1e-6
        )
    a, a_log, dt_bias = torch.randn(5, 4), torch.randn(4), torch.randn(4)
    expected = -a_log.double().exp() * (1 + (a.double() + dt_bias.double()).exp()).log()
    torch.testing.assert_close(delta_gate(a, a_log, dt_bias).double(), expected, rtol=1e-5, atol=1e-6)
