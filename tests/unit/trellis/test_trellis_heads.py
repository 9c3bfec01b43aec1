"""Outputs: readouts in both modes, exit logits, the specialisation switch, and dictionaries with and without auxiliary heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.trellis.trellis_cases import NANO, assert_same, make, some_ids

AUX_KEYS = (
    "aux_heads.ast.hidden.weight",
    "aux_heads.ast.out.weight",
    "aux_heads.boundary.hidden.weight",
    "aux_heads.boundary.out.weight",
    "aux_heads.dfg.def_proj.weight",
    "aux_heads.dfg.pair.weight",
    "aux_heads.dfg.use_proj.weight",
    "aux_heads.type.hidden.weight",
    "aux_heads.type.out.weight",
)


@pytest.mark.parametrize("k", [1, 3])
def test_readouts_satisfy_one_contract_in_both_modes(k: int) -> None:
    ids = some_ids(2, 9)
    hidden, logits = make()(ids, k=k), make(readout_mode="logits")(ids, k=k)
    assert (hidden.readout_mode, logits.readout_mode) == ("hidden", "logits")
    assert len(hidden.readouts) == len(logits.readouts) == hidden.executed_loops == k
    for j, (one, other) in enumerate(zip(hidden.readouts, logits.readouts, strict=True), start=1):
        assert one.loop == other.loop == j
        assert one.logits is None
        assert other.hidden is None
        assert_same(one.as_logits(), other.as_logits())
        assert_same(one.as_logits(), hidden.readout_applicator(one.hidden))
        assert_same(one.as_logits(), other.applicator(one.hidden))
    assert_same(hidden.logits, logits.logits)
    assert make()(ids, readout_mode="logits").readouts[0].logits is not None


def test_hidden_mode_computes_only_the_final_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, made = make(), some_ids(2, 9), []
    logits = model.embedding.logits
    monkeypatch.setattr(model.embedding, "logits", lambda z: made.append(z.shape) or logits(z))
    model(ids)
    assert len(made) == 1
    model(ids, readout_mode="logits")
    assert len(made) == 6


def test_exit_logits_are_reported_and_never_acted_on() -> None:
    model, ids = make(), some_ids(2, 9)
    with torch.no_grad():
        before = model(ids)
        for head in model.exit_heads.values():
            head.bias.fill_(1e6)
        after, two = model(ids), model(ids, k=2)
    assert before.exit_logits.shape == (4, 2, 9)
    assert two.exit_logits.shape == (2, 2, 9)
    assert bool((after.exit_logits > 1e5).all())
    assert_same(after.logits, before.logits)
    assert_same(after.loop_counts, before.loop_counts)


def test_a_model_of_one_loop_has_no_exit_logits() -> None:
    out = make(replace(NANO, rho=("1.0",)))(some_ids(1, 5))
    assert out.exit_logits is None
    assert (out.router_masks, out.router_scores, out.executed_loops) == ((), (), 1)


def test_depth_is_reported_per_token() -> None:
    model, ids = make(), some_ids(2, 9)
    for k in (1, 2, 3, 4):
        out = model(ids, k=k)
        assert len(out.router_masks) == len(out.router_scores) == k - 1
        assert out.loop_counts.dtype == torch.int64
        due = torch.ones(2, 9, dtype=torch.int64) + sum(mask.long() for mask in out.router_masks)
        assert_same(out.loop_counts, due)
        assert out.loop_counts.max() == k


def test_without_specialisation_every_loop_is_the_base_block() -> None:
    """Off, gains and adapters matter no more; neutral gains and adapters are the same as off."""
    ids, off = some_ids(2, 9), make(specialisation_enabled=False)
    moved = make(specialisation_enabled=False)
    with torch.no_grad():
        for parameter in moved.specialisation.parameters():
            parameter.fill_(0.3)
    assert_same(moved(ids).logits, off(ids).logits)
    neutral = make()
    with torch.no_grad():
        for key, parameter in neutral.specialisation.named_parameters():
            if key.endswith(".B"):
                parameter.zero_()
            elif key.startswith("gains"):
                parameter.fill_(1.0)
    assert_same(neutral(ids).logits, off(ids).logits)
    assert not torch.equal(make()(ids).logits, off(ids).logits)


def test_strip_aux_heads_leaves_the_model_alone() -> None:
    model = make()
    serving = model.strip_aux_heads()
    assert model.stripped_keys() == AUX_KEYS
    assert model.state_dict().keys() - serving.keys() == set(AUX_KEYS)
    assert serving["bank.values"].data_ptr() == model.bank.values.data_ptr()
    assert set(model(some_ids(1, 4)).aux) == {"boundary", "ast", "type"}
    assert make(replace(NANO, aux=None)).stripped_keys() == ()


def test_loading_into_models_with_and_without_heads() -> None:
    trained, ids = make(seed=1), some_ids(1, 6)
    full, serving = trained.state_dict(), trained.strip_aux_heads()
    bare, heads = make(replace(NANO, aux=None)), make()
    own = heads.aux_heads.dfg.pair.weight.clone()
    result, surplus = bare.load_serving_state_dict(full)
    assert surplus == AUX_KEYS
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert len(full) == 298
    result, surplus = heads.load_serving_state_dict(serving)
    assert surplus == ()
    assert result.missing_keys == []
    assert_same(heads.aux_heads.dfg.pair.weight.detach(), own.detach())
    for model in (bare, heads):
        assert_same(model(ids).logits, trained(ids).logits)
    heads.load_serving_state_dict(full)
    assert_same(heads(ids).aux, trained(ids).aux)


def test_loading_is_strict_about_everything_else() -> None:
    model = make()
    wrong = model.strip_aux_heads()
    wrong["bank.more"] = wrong.pop("final_norm.gain")
    with pytest.raises(RuntimeError, match=r"final_norm\.gain"):
        model.load_serving_state_dict(wrong)
    result, surplus = model.load_serving_state_dict(wrong, strict=False)
    assert (result.missing_keys, result.unexpected_keys, surplus) == (["final_norm.gain"], ["bank.more"], ())
    assert set(wrong) == {*model.strip_aux_heads(), "bank.more"} - {"final_norm.gain"}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_serving_state_dict(model.state_dict() | {"final_norm.gain": torch.ones(3)})
