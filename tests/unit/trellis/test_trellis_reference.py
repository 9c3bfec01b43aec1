"""The model in float64 against the formulas written out: Gated DeltaNet, attention, router, bank, loops, heads."""

from __future__ import annotations

import math

import pytest
import torch

from model.trellis.delta import GdnState, decay_offsets
from model.trellis.projection import NEUTRAL
from tests.unit.trellis.trellis_cases import NANO, NO_SLIDING, make, some_ids
from tests.unit.trellis.trellis_reference import Reference, sigmoid, silu

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
"""Rotary angles and decay offsets are float32 constants; everything else is float64 on both sides."""


@pytest.fixture(scope="module")
def reference():
    model = make(NANO, torch.float64)
    ids = some_ids(1, 21)
    expected = Reference(NANO, model.state_dict())
    expected.run(ids[0].tolist(), 4)
    return model, ids, expected


def test_the_whole_forward_is_the_formulas(reference) -> None:
    model, ids, expected = reference
    out = model(ids)
    torch.testing.assert_close(out.logits[0], expected.logits, **CLOSE)
    for readout, hidden in zip(out.readouts, expected.hidden, strict=True):
        torch.testing.assert_close(readout.hidden[0], hidden, **CLOSE)
    torch.testing.assert_close(out.exit_logits[:, 0], torch.stack(expected.exits), **CLOSE)


def test_the_router_scores_and_selects_as_the_formulas(reference) -> None:
    model, ids, expected = reference
    out = model(ids)
    for mask, scores, due_mask, due_scores in zip(
        out.router_masks, out.router_scores, expected.masks, expected.scores, strict=True
    ):
        torch.testing.assert_close(scores[0], due_scores, **CLOSE)
        assert mask[0].tolist() == due_mask.tolist()
    assert out.loop_counts[0].tolist() == (1 + torch.stack(expected.masks).sum(0)).tolist()
    assert len({mask.sum().item() for mask in out.router_masks}) == 3


def test_the_bank_reads_what_brute_force_finds(reference) -> None:
    model, ids, expected = reference
    out = model(ids)
    for readout, slots, weights in zip(out.bank, expected.slots, expected.weights, strict=True):
        assert torch.equal(readout.indices[0], slots)
        torch.testing.assert_close(readout.weights[0], weights, **CLOSE)
        assert bool((readout.weights[..., -1] == 0).all())


def test_the_bank_moves_the_result() -> None:
    """Otherwise agreement about it would say nothing."""
    model, ids = make(NANO, torch.float64), some_ids(1, 8)
    with torch.no_grad():
        model.bank.values *= 100
    expected = Reference(NANO, model.state_dict())
    expected.run(ids[0].tolist(), 2)
    torch.testing.assert_close(model(ids, k=2).logits[0], expected.logits, **CLOSE)
    without = make(NANO, torch.float64, bank_enabled=False)
    assert (without(ids, k=2).logits[0] - expected.logits).abs().max() > 1e-2


def test_the_auxiliary_heads_are_the_formulas(reference) -> None:
    model, ids, expected = reference
    pairs = torch.tensor([[[0, 3], [5, 5], [20, 1]]])
    aux, p, z = model(ids, dfg_pairs=pairs).aux, expected.p, expected.z
    for name in ("boundary", "ast", "type"):
        due = silu(z @ p[f"aux_heads.{name}.hidden.weight"].T) @ p[f"aux_heads.{name}.out.weight"].T
        torch.testing.assert_close(aux[name][0], due, **CLOSE)
    for row, (first, second) in enumerate(pairs[0].tolist()):
        left, right = p["aux_heads.dfg.def_proj.weight"] @ z[first], p["aux_heads.dfg.use_proj.weight"] @ z[second]
        due = [(pair * left * right).sum() for pair in p["aux_heads.dfg.pair.weight"]]
        torch.testing.assert_close(aux["dfg"][0, row], torch.stack(due), **CLOSE)


def test_a_core_without_sliding_layer_is_the_formulas() -> None:
    model, ids = make(NO_SLIDING, torch.float64), some_ids(1, 9)
    expected = Reference(NO_SLIDING, model.state_dict())
    expected.run(ids[0].tolist(), 3)
    torch.testing.assert_close(model(ids, k=3).logits[0], expected.logits, **CLOSE)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 70])
def test_gated_delta_net_is_the_recurrence(tokens: int) -> None:
    """In float32, from a state that is not zero, for two sequences."""
    mixer = make(NANO).prelude.layers[0].mixer
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(2, tokens, 64, generator=generator)
    state = GdnState(torch.randn(2, 4, 16, 24, generator=generator), torch.randn(2, 3, 224, generator=generator))
    with torch.no_grad():
        got, after = mixer(x, NEUTRAL, state)
    p = {key: tensor.double() for key, tensor in mixer.state_dict().items()}
    for b in range(2):
        past, s = list(state.conv[b].double()), state.s[b].double()
        for t in range(tokens):
            row = x[b, t].double()
            past.append(torch.cat([p[f"{w}_proj.weight"] @ row for w in ("q", "k", "v")]))
            weight = torch.cat([p[f"{w}_conv.weight"] for w in ("q", "k", "v")])
            y = silu(sum(weight[:, i] * past[-4 + i] for i in range(4)))
            q, k, v = y[:64].view(4, 16), y[64:128].view(4, 16), y[128:].view(4, 24)
            q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / 4
            k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            alpha = 1 / (1 + torch.exp(p["a_proj.weight"] @ row + decay_offsets(4)))
            beta = sigmoid(p["b_proj.weight"] @ row)
            s = alpha[:, None, None] * s
            s = s + k[:, :, None] * (beta[:, None] * (v - torch.einsum("hkv,hk->hv", s, k)))[:, None]
            o = torch.einsum("hkv,hk->hv", s, q)
            o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["out_norm.gain"]
            torch.testing.assert_close(got[b, t].double(), p["o_proj.weight"] @ o.flatten(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after.s[b].double(), s, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after.conv[b].double(), torch.stack(past[-3:]), rtol=1e-4, atol=1e-5)


def test_half_lives_of_the_heads() -> None:
    """softplus(c) runs from 0.001 to 0.1, so states halve in 693 to 7 tokens."""
    offsets = decay_offsets(12).double()
    halves = math.log(2) / torch.log(1 + torch.exp(offsets))
    assert halves[0].item() == pytest.approx(693.15, abs=0.1)
    assert halves[-1].item() == pytest.approx(6.93, abs=0.01)
    ratios = halves[:-1] / halves[1:]
    torch.testing.assert_close(ratios, ratios[:1].expand(11), rtol=1e-4, atol=0)
