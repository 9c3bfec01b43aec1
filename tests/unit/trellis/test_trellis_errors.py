"""Everything a model rejects, by the error the contract names; a rejected call leaves its bundle as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.errors import ModelError
from model.trellis import (
    LoopEngineError,
    ModelConfigError,
    ModelSettings,
    ModelStateError,
    ParameterAuditError,
    RouterSettings,
    build_model,
    build_preset_model,
)
from model.trellis.bank import Shard
from model.trellis.delta import GdnState
from model.trellis.state import GlobalKV
from tests.unit.trellis.trellis_cases import NANO, NO_SLIDING, make, some_ids

IDS = some_ids(2, 6)
ALL = torch.ones(2, 6, dtype=torch.bool)
NONE = torch.zeros(2, 6, dtype=torch.bool)
MODEL = make()

BAD_CALLS = {
    "id above": (ModelConfigError, {"token_ids": torch.full((2, 6), 256)}),
    "id below": (ModelConfigError, {"token_ids": torch.full((2, 6), -1)}),
    "ids int32": (ModelConfigError, {"token_ids": IDS.int()}),
    "ids float": (ModelConfigError, {"token_ids": IDS.float()}),
    "ids 3d": (ModelConfigError, {"token_ids": IDS[None]}),
    "no tokens": (ModelConfigError, {"token_ids": IDS[:, :0]}),
    "no sequences": (ModelConfigError, {"token_ids": IDS[:0]}),
    "mode": (ModelConfigError, {"readout_mode": "both"}),
    "dfg shape": (ModelConfigError, {"dfg_pairs": torch.zeros(2, 3, dtype=torch.int64)}),
    "dfg batch": (ModelConfigError, {"dfg_pairs": torch.zeros(1, 3, 2, dtype=torch.int64)}),
    "dfg dtype": (ModelConfigError, {"dfg_pairs": torch.zeros(2, 3, 2)}),
    "dfg range": (ModelConfigError, {"dfg_pairs": torch.full((2, 3, 2), 6)}),
    "classes shape": (ModelConfigError, {"token_classes": torch.zeros(2, 5, dtype=torch.int64)}),
    "classes dtype": (ModelConfigError, {"token_classes": torch.zeros(2, 6)}),
    "classes range": (ModelConfigError, {"token_classes": torch.full((2, 6), 4)}),
    "k zero": (LoopEngineError, {"k": 0}),
    "k five": (LoopEngineError, {"k": 5}),
    "k bool": (LoopEngineError, {"k": True}),
    "k float": (LoopEngineError, {"k": 2.0}),
    "plan short": (LoopEngineError, {"plan": [ALL, ALL]}),
    "plan long": (LoopEngineError, {"plan": [ALL] * 4}),
    "plan at k 1": (LoopEngineError, {"k": 1, "plan": [ALL]}),
    "plan tensor": (LoopEngineError, {"plan": torch.stack([ALL] * 3)}),
    "plan shape": (LoopEngineError, {"plan": [ALL, ALL, ALL[:, :5]]}),
    "plan dtype": (LoopEngineError, {"plan": [ALL, ALL, ALL.long()]}),
    "plan revives": (LoopEngineError, {"plan": [ALL, NONE, ALL]}),
    "state type": (ModelStateError, {"state": object()}),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_forward_rejects(name: str) -> None:
    error, arguments = BAD_CALLS[name]
    with pytest.raises(error):
        MODEL(**({"token_ids": IDS} | arguments))
    assert issubclass(error, ModelError)


STEP = {"token_id": IDS[:, :1]}
BAD_STEPS = {
    "id": (ModelConfigError, {"token_id": torch.tensor([0, 256])}),
    "two tokens": (ModelConfigError, {"token_id": IDS[:, :2]}),
    "3d": (ModelConfigError, {"token_id": IDS[:, :1, None]}),
    "classes": (ModelConfigError, {"token_classes": torch.tensor([0, 9])}),
    "dfg": (ModelConfigError, {"dfg_pairs": torch.ones(2, 1, 2, dtype=torch.int64)}),
    "k": (LoopEngineError, {"k": 9}),
    "plan": (LoopEngineError, {"plan": [ALL[:, :1]] * 2}),
    "revival": (LoopEngineError, {"plan": [NONE[:, :1], ALL[:, :1], NONE[:, :1]]}),
    "no state": (ModelStateError, {"state": None}),
    "batch": (ModelStateError, {"state": MODEL.initial_state(3, 8)}),
    "another graph": (ModelStateError, {"state": make(NO_SLIDING).initial_state(2, 8)}),
    "another window": (ModelStateError, {"state": make(replace(NANO, window=9)).initial_state(2, 8)}),
    "another dtype": (ModelStateError, {"state": make(dtype=torch.bfloat16).initial_state(2, 8)}),
    "another device": (ModelStateError, {"state": MODEL.initial_state(2, 8, device="meta")}),
    "full": (ModelStateError, {"state": replace(MODEL.initial_state(2, 8), position=8)}),
    "key bias": (ModelStateError, {"state": make(boundary_bias=(0.0,) * 4).initial_state(2, 8)}),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_step_rejects_and_leaves_the_bundle(name: str) -> None:
    error, arguments = BAD_STEPS[name]
    with torch.no_grad():
        state = MODEL(IDS, state=MODEL.initial_state(2, 8), return_state=True).state
    before = {key: tensor.clone() for key, tensor in state.tensors().items()}
    with pytest.raises(error):
        MODEL.step(**(STEP | {"state": state} | arguments))
    for key, tensor in state.tensors().items():
        assert torch.equal(tensor, before[key]), key


def test_forward_past_the_capacity_writes_nothing() -> None:
    state = MODEL.initial_state(2, 5)
    with pytest.raises(ModelStateError, match="capacity of 5"):
        MODEL(IDS, state=state)
    assert not bool(state.global_kv[0].k.any())


def test_a_state_tensor_of_another_shape_is_named() -> None:
    state = MODEL.initial_state(2, 8)
    wrong = GdnState(torch.zeros(2, 4, 16, 16), state.gdn[3].conv)
    with pytest.raises(ModelStateError, match=r"gdn\[3\].s is \(2, 4, 16, 16\), not \(2, 4, 16, 24\)"):
        MODEL.step(IDS[:, 0], replace(state, gdn=(*state.gdn[:3], wrong, *state.gdn[4:])))
    cache = GlobalKV(state.global_kv[1].k.long(), state.global_kv[1].v)
    with pytest.raises(ModelStateError, match=r"global_kv\[1\].k is torch.int64"):
        MODEL.step(IDS[:, 0], replace(state, global_kv=(state.global_kv[0], cache)))


@pytest.mark.parametrize(("batch", "capacity", "dtype"), [(0, 8, None), (1, 0, None), (1, True, None), (1, 8, torch.int8)])
def test_an_impossible_state_is_refused(batch: int, capacity: int, dtype: torch.dtype | None) -> None:
    with pytest.raises(ModelStateError):
        MODEL.initial_state(batch, capacity, dtype=dtype)


BAD_CONFIGS = {
    "first capacity": {"rho": ("0.5", "0.25")},
    "no loops": {"rho": ()},
    "capacity zero": {"rho": ("1.0", "0")},
    "capacity above": {"rho": ("1.0", "1.5")},
    "capacity text": {"rho": ("1.0", "half")},
    "capacity float": {"rho": ("1.0", 0.5)},
    "heads": {"heads": 3},
    "head size": {"head_dim": 15},
    "width": {"d_model": 0},
    "top-k": {"bank_top_k": 17},
    "core": {"core": ("gdn", "global")},
    "prelude": {"prelude": ("sliding",)},
    "coda": {"coda": ()},
    "qk norm": {"qk_norm": "some"},
    "conv": {"gdn_conv": 1},
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_configuration_that_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(ModelConfigError):
        replace(NANO, **BAD_CONFIGS[name])


@pytest.mark.parametrize(
    "settings",
    [
        {"readout_mode": "all"},
        {"bank_weighting": "hard"},
        {"bank_shard_mode": "tree"},
        {"boundary_bias": (1.0,)},
        {"dropout": 1.0},
    ],
    ids=str,
)
def test_settings_that_do_not_exist_are_refused(settings: dict) -> None:
    with pytest.raises(ModelConfigError):
        ModelSettings(**settings)


def test_one_tie_break() -> None:
    with pytest.raises(ModelConfigError, match="lower_index"):
        RouterSettings(tie_break="random")


def test_a_growing_schedule_needs_a_router_without_nesting() -> None:
    config = replace(NANO, rho=("1.0", "0.5", "0.75", "0.25"))
    with pytest.raises(ModelConfigError, match="grows"):
        build_model(config, device="meta")
    model = build_model(config, ModelSettings(router=RouterSettings(nested=False)))
    assert [mask.sum().item() for mask in model(IDS[:1]).router_masks] == [3, 5, 2]
    revived = [ALL[:1], NONE[:1], ALL[:1]]
    assert model(IDS[:1], plan=revived).loop_counts.tolist() == [[3] * 6]


@pytest.mark.parametrize(("rank", "world"), [(0, 3), (2, 2), (-1, 2)])
def test_a_table_that_cannot_be_shared_out_is_refused(rank: int, world: int) -> None:
    with pytest.raises(ModelConfigError, match="256 slots"):
        build_model(NANO, device="meta", shard=Shard(rank, world, lambda part: part))


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ModelConfigError, match="trellis-180m"):
        build_preset_model("trellis-7b")


@pytest.mark.parametrize("k", [0, 5, None, True])
def test_effective_depth_knows_its_loops(k: object) -> None:
    with pytest.raises(LoopEngineError):
        MODEL.effective_depth(k)


def test_every_error_is_a_model_error() -> None:
    for error in (ModelConfigError, LoopEngineError, ModelStateError, ParameterAuditError):
        assert issubclass(error, ModelError)
