"""Training through the interface: gradients everywhere, checkpointed activations, and a loss that falls."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from model.trellis import TrellisModel, TrellisOutput
from model.trellis.router import credit
from tests.unit.trellis.trellis_cases import NANO, assert_same, make, random_masks, some_ids

PAIRS = torch.tensor([[[0, 3], [2, 7]], [[1, 1], [9, 0]]])


def wide(logits: torch.Tensor) -> torch.Tensor:
    """`[B, n, labels] -> [B n, labels]`, at least float32."""
    return logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))


def loss_of(out: TrellisOutput, ids: torch.Tensor) -> torch.Tensor:
    """Next tokens from the final logits and every readout, exits against a target, and labels made of the ids."""
    targets = ids[:, 1:]

    def tokens(logits: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(wide(logits[:, :-1]), targets.flatten())

    loss = tokens(out.logits) + 0.1 * sum(tokens(readout.as_logits()) for readout in out.readouts)
    loss = loss + 0.1 * functional.binary_cross_entropy_with_logits(out.exit_logits, torch.full_like(out.exit_logits, 0.3))
    for name in ("boundary", "ast", "type"):
        logits = out.aux[name]
        loss = loss + 0.1 * functional.cross_entropy(wide(logits), ids.flatten() % logits.shape[-1])
    if "dfg" in out.aux:
        loss = loss + 0.1 * functional.cross_entropy(wide(out.aux["dfg"]), torch.tensor([0, 1, 1, 0]))
    return loss


def gradients(model: TrellisModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_reach_every_parameter(dtype: torch.dtype) -> None:
    model, ids = make(dtype=dtype), some_ids(2, 24)
    loss_of(model(ids, dfg_pairs=PAIRS), ids).backward()
    found = gradients(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, gradient in found.items():
        assert bool(gradient.isfinite().all()), name
        assert bool(gradient.any()), name


def test_gradients_are_those_of_finite_differences() -> None:
    """Router scores aside, whose gradient is a surrogate: with a plan, in float64, along a random direction per tensor."""
    model, ids = make(dtype=torch.float64), some_ids(2, 13)
    plan = random_masks(model, 2, 13)
    loss_of(model(ids, dfg_pairs=PAIRS, plan=plan), ids).backward()
    parts = ("embedding", "prelude", "core", "coda", "adapters", "gains", "exit_heads", "final_norm", "bank", "aux_heads")
    for part in parts:
        own = [(name, parameter) for name, parameter in sorted(model.named_parameters()) if part in name.split(".")[:2]]
        generator = torch.Generator().manual_seed(len(own))
        moves = [torch.randn(parameter.shape, generator=generator).double() for _, parameter in own]
        due = sum((move * parameter.grad).sum() for move, (_, parameter) in zip(moves, own, strict=True))
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                for move, (_, parameter) in zip(moves, own, strict=True):
                    parameter += sign * 1e-8 * move
                losses.append(loss_of(model(ids, dfg_pairs=PAIRS, plan=plan), ids))
                for move, (_, parameter) in zip(moves, own, strict=True):
                    parameter -= sign * 1e-8 * move
        torch.testing.assert_close((losses[0] - losses[1]) / 2e-8, due, rtol=1e-4, atol=1e-6, msg=part)


def test_the_gradient_of_a_score_is_that_of_a_gated_pass_at_the_full_output() -> None:
    """d/ds of `before + sigmoid(s) (ran - before)`, while the value stays `ran`."""
    generator = torch.Generator().manual_seed(0)
    ran, before, weight = (torch.randn(2, 5, 8, generator=generator).double().requires_grad_() for _ in range(3))
    scores = torch.randn(2, 5, generator=generator).double().requires_grad_()
    out = credit(ran, before, scores)
    assert torch.equal(out, ran)
    (out * weight).sum().backward()
    gated = before + scores.sigmoid().unsqueeze(-1) * (ran.detach() - before)
    (due,) = torch.autograd.grad((gated * weight.detach()).sum(), scores)
    torch.testing.assert_close(scores.grad, due)
    torch.testing.assert_close(ran.grad, weight.detach())
    assert before.grad is None


@pytest.mark.parametrize("ragged", [False, True], ids=["routed", "planned"])
def test_activation_checkpointing_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, ragged: bool) -> None:
    """`core_pass` runs once a loop forward and once more backward; loss and gradients are the same."""
    ids, results, calls = some_ids(2, 16), [], []
    for checkpointed in (False, True):
        model = make()
        core_pass = model.engine.core_pass
        monkeypatch.setattr(model.engine, "core_pass", lambda *a, run=core_pass: calls.append(a[1].loop) or run(*a))
        if checkpointed:
            model.engine.segment_executor = partial(checkpoint, use_reentrant=False)
        calls.clear()
        loss = loss_of(model(ids, plan=random_masks(model, 2, 16) if ragged else None), ids)
        forward = list(calls)
        loss.backward()
        results.append((loss.detach(), gradients(model)))
        assert sorted(set(forward)) == [1, 2, 3, 4]
        assert ragged or forward == [1, 2, 3, 4]
        assert sorted(calls[len(forward) :]) == (sorted(forward) if checkpointed else [])
    assert_same(results[0], results[1])


def test_core_pass_changes_none_of_its_arguments() -> None:
    model, seen = make(), []

    def executor(function, *arguments):
        h, place, gdn, windows = arguments
        before = [part.clone() for part in (h, *(t for state in gdn for t in state), *(t for window in windows for t in window))]
        first, second = function(*arguments), function(*arguments)
        after = [h, *(t for state in gdn for t in state), *(t for window in windows for t in window)]
        assert_same(tuple(before), tuple(after))
        assert_same(first[0], second[0])
        seen.append(place.loop)
        return first

    model.engine.segment_executor = executor
    with torch.no_grad():
        model(some_ids(2, 10))
    assert seen == [1, 2, 3, 4]


def test_a_short_training_run_lowers_the_loss() -> None:
    text = (b"def area(width, height):\n    return width * height\n\n\ndef half(value):\n    return value / 2\n" * 3)[:257]
    data = torch.tensor(list(text))
    config = replace(NANO, core=("gdn", "sliding"), context=32)
    model = make(config, stir=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(120):
        starts = torch.randint(len(data) - 33, (4,), generator=generator).tolist()
        ids = torch.stack([data[start : start + 32] for start in starts])
        out = model(ids)
        loss = loss_of(out, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item())
    assert losses[0] > 5
    assert sum(losses[-10:]) / 10 < 0.5
    ids = data[:32].unsqueeze(0)
    serving = make(replace(config, aux=None), seed=5)
    serving.load_serving_state_dict(model.strip_aux_heads())
    with torch.no_grad():
        trained, served = model(ids), serving(ids)
    assert_same(trained.logits, served.logits)
    assert_same(trained.exit_logits, served.exit_logits)
    assert_same(trained.router_masks, served.router_masks)


def test_dropout_acts_in_training_alone() -> None:
    plain, model, ids = make(), make(dropout=0.5), some_ids(1, 8)
    assert not torch.equal(model(ids).logits, plain(ids).logits)
    with torch.no_grad():
        assert_same(model.step(3, model.initial_state(1, 4)).logits, plain.step(3, plain.initial_state(1, 4)).logits)
    model.eval()
    assert_same(model(ids).logits, plain(ids).logits)
