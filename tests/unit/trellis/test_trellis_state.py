"""State bundles: what a call changes, going back, plans that differ within a batch, caches in bfloat16, key biases."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from model.trellis.projection import NEUTRAL
from tests.unit.trellis.trellis_cases import NANO, assert_same, logits_of, make, random_masks, some_ids, step_through


def test_a_step_changes_nothing_but_rows_of_the_global_caches() -> None:
    model, ids = make(), some_ids(2, 12)
    with torch.no_grad():
        state = model(ids, state=model.initial_state(2, 16), return_state=True).state
        before = {name: tensor.clone() for name, tensor in state.tensors().items()}
        out = model.step(ids[:, 0], state)
    for name, tensor in state.tensors().items():
        part = slice(None, 12) if name.startswith("global") else slice(None)
        assert torch.equal(tensor[:, part], before[name][:, part]), name
    assert (state.position, out.state.position) == (12, 13)
    assert out.state.global_kv[0].k.data_ptr() == state.global_kv[0].k.data_ptr()
    with pytest.raises(FrozenInstanceError):
        state.position = 0


def test_going_back_to_an_old_bundle_is_exact_at_k_1() -> None:
    model, ids = make(), some_ids(1, 20)
    with torch.no_grad():
        state = model(ids[:, :15], k=1, state=model.initial_state(1, 32), return_state=True).state
        first = step_through(model, ids[:, 15:], 1, state=state)
        step_through(model, some_ids(1, 4, seed=8), 1, state=state)
        again = step_through(model, ids[:, 15:], 1, state=state)
    assert_same(logits_of(again), logits_of(first))
    assert_same(again[-1].state, first[-1].state)


def test_untouched_instances_are_passed_on() -> None:
    model = make()
    with torch.no_grad():
        state = model(some_ids(1, 5), return_state=True).state
        after = model.step(3, state, k=2).state
    untouched = [old is new for old, new in zip(state.gdn, after.gdn, strict=True)]
    assert untouched == [False] * 11 + [True] * 10 + [False]


def test_sequences_of_a_batch_may_have_different_plans() -> None:
    """Each as if it were alone, in prefill and in a step."""
    model, ids = make(dtype=torch.float64), some_ids(4, 13)
    plan = random_masks(model, 4, 13)
    with torch.no_grad():
        together = model(ids, plan=plan, return_state=True)
        for b in range(4):
            one = slice(b, b + 1)
            alone = model(ids[one], plan=[mask[one] for mask in plan], return_state=True)
            torch.testing.assert_close(together.logits[one], alone.logits, rtol=0, atol=1e-10)
            for name, tensor in alone.state.tensors().items():
                torch.testing.assert_close(together.state.tensors()[name][one], tensor, rtol=0, atol=1e-10)
        column = [mask[:, 5:6] for mask in plan]
        stepped = model.step(ids[:, 0], together.state, plan=column)
        assert stepped.loop_counts.tolist() == (1 + torch.stack(column).sum(0)).tolist()


def test_token_ids_may_be_one_sequence_or_one_token() -> None:
    model = make()
    ids = some_ids(1, 6)
    with torch.no_grad():
        assert_same(model(ids[0], token_classes=torch.zeros(6, dtype=torch.int64)).logits, model(ids).logits)
        results = [
            model.step(token, model.initial_state(1, 4)).logits
            for token in (int(ids[0, 0]), ids[0, 0], ids[:, 0], ids[:, :1], ids[0, :1])
        ]
    for result in results:
        assert_same(result, results[0])


def test_a_forward_with_state_goes_on_and_defaults_to_the_training_context() -> None:
    model, ids = make(), some_ids(2, 12)
    with torch.no_grad():
        assert model(ids).state is None
        first = model(ids[:, :5], k=1, return_state=True).state
        assert (first.position, first.capacity) == (5, NANO.context)
        second = model(ids[:, 5:], k=1, state=first, return_state=True)
        torch.testing.assert_close(second.logits, model(ids, k=1).logits[:, 5:], rtol=0, atol=1e-5)
        assert model(ids[:, 5:], k=1, state=first).state is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_caches_may_be_bfloat16(dtype: torch.dtype) -> None:
    """Forward attends to the rounded entries too, so decode differs from it no more than the model's own rounding."""
    model, ids = make(dtype=dtype), some_ids(2, 20)
    state = model.initial_state(2, 20, dtype=torch.bfloat16)
    assert state.sliding[0].k.dtype == state.global_kv[0].v.dtype == torch.bfloat16
    assert (state.gdn[0].s.dtype, state.gdn[0].conv.dtype) == (torch.float32, dtype)
    with torch.no_grad():
        expected = model(ids, k=1, state=model.initial_state(2, 20, dtype=torch.bfloat16), return_state=True)
    got = step_through(model, ids, 1, state=state)
    scale = expected.logits.abs().max()
    assert (logits_of(got) - expected.logits).abs().max() <= (1e-3 if dtype == torch.float32 else 5e-2) * scale


def test_gradients_pass_a_forward_that_keeps_its_state() -> None:
    """The caches are written with values alone; the same loss gives the same gradients with and without them."""
    ids, gradients = some_ids(2, 9), []
    for keep in (False, True):
        model = make()
        out = model(ids, return_state=keep)
        if keep:
            model.step(ids[:, 0], out.state)
            assert not out.state.global_kv[0].k.requires_grad
        out.logits.square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_same(gradients[0], gradients[1])


def test_boundary_bias_moves_scores_of_keys_by_class() -> None:
    """The A9 arm: equal biases change nothing, a huge negative one hides its tokens, and the cache remembers them."""
    ids, classes = some_ids(1, 10), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 0, 0]])
    plain, flat = make(), make(boundary_bias=(2.0, 2.0, 2.0, 2.0))
    hiding = make(boundary_bias=(0.0, -1e9, 0.0, 0.0))
    with torch.no_grad():
        assert_same(plain(ids, token_classes=classes).logits, plain(ids).logits)
        assert_same(hiding(ids).logits, hiding(ids, token_classes=torch.zeros_like(ids)).logits)
        torch.testing.assert_close(flat(ids, token_classes=classes).logits, plain(ids).logits, rtol=0, atol=1e-5)
        hidden = hiding(ids, k=1, token_classes=classes)
        assert not torch.allclose(hidden.logits, plain(ids, k=1).logits, atol=1e-4)
        state = hiding.initial_state(1, 10)
        for t in range(10):
            out = hiding.step(ids[:, t], state, k=1, token_classes=classes[:, t])
            state = out.state
            torch.testing.assert_close(out.logits[:, 0], hidden.logits[:, t], rtol=0, atol=1e-4)
        x = torch.randn(1, 10, 64, generator=torch.Generator().manual_seed(0))
        place, mixer = hiding._place(0, 10), hiding.prelude.layers[1].mixer
        bias = hiding._key_bias(_call(hiding, ids, classes))
        other = x.clone()
        other[:, [1, 5]] *= 2
        seen = [mixer(each, NEUTRAL, None, place, bias)[0, [0, 2, 3, 4, 6, 7, 8, 9]] for each in (x, other)]
    assert_same(seen[0], seen[1])


def _call(model, ids, classes):
    return model._check(ids, 1, None, None, classes, None)
