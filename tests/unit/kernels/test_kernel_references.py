"""The torch references of norms, rotary embedding, router, convolution and experts, against formulas in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.causal_conv import conv_piece, conv_step
from kernels.experts import ExpertForm, Held, plan_experts, run_experts
from kernels.rms_norm import gated_rms_norm, rms_norm, zero_centered_rms_norm
from kernels.rotary import rotary_tables, rotate
from kernels.router import route


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool((got.double() - expected.double()).abs().max() <= tolerance * expected.double().abs().max())


@pytest.mark.parametrize("shape", [(1, 1), (1, 63), (65, 48), (3, 5, 7)], ids=str)
def test_norms(shape: tuple[int, ...]) -> None:
    x, gate, weight = random(*shape), random(*shape, seed=1), random(shape[-1], seed=2)
    scaled = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    assert close(rms_norm(x, weight, 1e-3), scaled * weight.double())
    assert close(zero_centered_rms_norm(x, weight, 1e-3), scaled * (1 + weight.double()))
    silu = gate.double() / (1 + (-gate.double()).exp())
    assert close(gated_rms_norm(x, gate, weight, 1e-3), scaled * weight.double() * silu)


@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(1, 2, 2), (3, 16, 16), (5, 16, 4), (2, 12, 10)])
def test_rotary(heads: int, head_dim: int, rotary_dim: int) -> None:
    positions = torch.tensor([0, 1, 63, 200], dtype=torch.int32)
    inv_freq = 100.0 ** -torch.linspace(0, 1, rotary_dim // 2)
    x = random(4, heads, head_dim)
    angle = (positions.double()[:, None] * inv_freq.double())[:, None]
    first, second, rest = x.double().split((rotary_dim // 2, rotary_dim // 2, head_dim - rotary_dim), -1)
    turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin(), rest)
    cos, sin = rotary_tables(positions, inv_freq, 1.0, torch.float32)
    assert close(rotate(x.clone(), cos, sin), torch.cat(turned, -1), 1e-4)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 1, 1), (1, 10, 3), (63, 7, 7), (5, 128, 8)])
def test_router(rows: int, experts: int, top_k: int, normalise: bool) -> None:
    logits = random(rows, experts)
    weights, chosen = route(logits, top_k, normalise)
    probabilities = logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)
    for row in range(rows):
        best = sorted(range(experts), key=lambda expert: -float(probabilities[row, expert]))[:top_k]
        assert chosen[row].tolist() == best
        expected = probabilities[row, best]
        assert close(weights[row], expected / expected.sum() if normalise else expected)


@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 63])
def test_convolution(rows: int, kernel: int) -> None:
    channels = 5
    x, before, weight = random(rows, channels), random(channels, kernel - 1, seed=1), random(channels, kernel, seed=2)
    inputs = torch.cat((before.t(), x)).double()
    out = torch.stack([(inputs[row : row + kernel] * weight.double().t()).sum(0) for row in range(rows)])
    expected = out / (1 + (-out).exp())
    got, after = conv_piece(x, before, weight)
    assert close(got, expected)
    assert torch.equal(after, inputs[-(kernel - 1) :].t().float())
    state = before.unsqueeze(0)
    for row in range(rows):
        got, state = conv_step(x[row : row + 1], state, weight)
        assert close(got[0], expected[row])
    assert torch.equal(state[0], after)


FORMS = [ExpertForm.DENSE, ExpertForm.GATHERED, ExpertForm.LISTED, ExpertForm.GROUPED]


@pytest.mark.parametrize("transposed", [False, True], ids=["row-major", "transposed"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "held"), [(1, 2, 8, [5]), (7, 3, 10, [0, 4, 9]), (65, 4, 4, [2, 3]), (2, 1, 6, [1])]
)
def test_experts(form: ExpertForm, rows: int, top_k: int, experts: int, held: list[int], transposed: bool) -> None:
    hidden, units = 12, 7
    x, logits = random(rows, hidden), random(rows, experts, seed=1)
    gate_up, down = random(len(held), 2 * units, hidden, seed=2), random(len(held), hidden, units, seed=3)
    weights, chosen = route(logits, top_k, False)
    local = torch.full((experts,), -1)
    local[held] = torch.arange(len(held))
    expected = torch.zeros(rows, hidden, dtype=torch.float64)
    for row in range(rows):
        for weight, expert in zip(weights[row].double(), chosen[row].tolist(), strict=True):
            if expert in held:
                gate, up = (gate_up[held.index(expert)].double() @ x[row].double()).split(units)
                expected[row] += weight * (down[held.index(expert)].double() @ (gate / (1 + (-gate).exp()) * up))
    if transposed:
        gate_up, down = gate_up.movedim(-1, 0).contiguous().movedim(0, -1), down.mT.contiguous().mT
    got = run_experts(form, x, chosen, weights, Held(local, torch.tensor(held)), gate_up, down)
    assert got.shape == x.shape
    assert close(got, expected) or (not expected.any() and not got.any())


def test_no_experts_held() -> None:
    x = random(3, 4)
    form = plan_experts(3, 1, 2, 0, on_host=True, may_wait=True)
    got = run_experts(
        form, x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), Held(torch.tensor([-1, -1]), torch.tensor([])), x, x
    )
    assert torch.equal(got, torch.zeros(3, 4))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_overflow_in_an_expert_that_was_not_chosen(form: ExpertForm) -> None:
    """Nothing of it reaches the row."""
    x, gate_up, down = torch.full((1, 2), 1e20), torch.ones(2, 2, 2), torch.ones(2, 2, 1)
    gate_up[0] *= 1e-20
    held = Held(torch.arange(2), torch.arange(2))
    got = run_experts(form, x, torch.tensor([[0]]), torch.ones(1, 1), held, gate_up, down)
    expected = torch.tensor(2.0).double().sigmoid() * 4
    assert close(got, expected.expand(1, 2))


def test_plan_of_experts() -> None:
    """Decode on a GPU never waits for the device, whatever the batch; the CPU lists a few pairs and groups many."""
    for rows in (1, 8, 128, 4096):
        form = plan_experts(rows, 8, 128, 64, on_host=False, may_wait=False)
        assert form is (ExpertForm.GATHERED if rows == 1 else ExpertForm.DENSE)
    assert plan_experts(4096, 8, 128, 64, on_host=False, may_wait=True) is ExpertForm.GROUPED
    assert plan_experts(1, 2, 8, 4, on_host=True, may_wait=True) is ExpertForm.LISTED
    assert plan_experts(64, 2, 8, 4, on_host=True, may_wait=True) is ExpertForm.GROUPED
    assert plan_experts(64, 8, 8, 4, on_host=True, may_wait=True) is ExpertForm.DENSE
