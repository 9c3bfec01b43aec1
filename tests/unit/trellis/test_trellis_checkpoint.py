"""Checkpoints on disk, layout 1: what is written, and every way in which a folder may be wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.errors import CheckpointError
from model.trellis import ModelSettings, build_model, load_checkpoint, save_checkpoint
from model.trellis.bank import Shard
from model.trellis.checkpoint import config_from_json, config_to_json
from model.trellis.presets import PRESETS
from tests.unit.trellis.trellis_cases import NANO, assert_same, make, some_ids

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(make(), tmp_path)
    return tmp_path


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder: Path, drop: tuple[str, ...] = (), **added: torch.Tensor) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({key: tensor for key, tensor in tensors.items() if key not in drop} | added, folder / WEIGHTS)


def test_a_round_trip_keeps_every_bit(folder: Path) -> None:
    model, back, ids = make(), load_checkpoint(folder, ModelSettings(readout_mode="logits")), some_ids(2, 7)
    assert back.config == NANO
    assert back.settings.readout_mode == "logits"
    assert_same(dict(back.state_dict()), dict(model.state_dict()))
    assert_same(back(ids).logits, model(ids).logits)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", WEIGHTS]


def test_what_is_on_disk(folder: Path) -> None:
    """The files as another program would read them."""
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["model_type"], config["trellis_layout"]) == (["TrellisForCausalLM"], "trellis", 1)
    assert config["rho"] == ["1.0", "1.0", "0.5", "0.25"]
    assert config["aux"]["type_labels"] == 32
    tensors = load_file(folder / WEIGHTS)
    assert len(tensors) == 298
    assert tensors["core.layers.3.mixer.w_g"].shape == (64,)
    assert tensors["specialisation.adapters.4.5.down.A"].shape == (4, 128)
    assert tensors["engine.routers.2.bias"].shape == (1,)
    assert tensors["bank.values"].shape == (256, 32)


def test_a_serving_checkpoint_has_no_auxiliary_heads(tmp_path: Path) -> None:
    model, ids = make(), some_ids(1, 7)
    save_checkpoint(model, tmp_path / "serving", aux=False)
    assert json.loads((tmp_path / "serving" / "config.json").read_text())["aux"] is None
    back = load_checkpoint(tmp_path / "serving")
    assert back.config == replace(NANO, aux=None)
    assert_same(back(ids).logits, model(ids).logits)


def test_a_rank_reads_its_rows_of_the_bank(folder: Path) -> None:
    """As construction from a seed gives them; the rest is alike on all ranks, and one rank's rows are no checkpoint."""
    whole = make(stir=0)
    save_checkpoint(whole, folder)
    for rank in range(4):
        shard = Shard(rank, 4, lambda part: part)
        back, built = load_checkpoint(folder, shard=shard), build_model(NANO, shard=shard)
        assert_same(back.bank.values.detach(), whole.bank.values.detach()[rank::4])
        assert_same(dict(back.state_dict()), dict(built.state_dict()))
    with pytest.raises(CheckpointError, match="one rank of 4"):
        save_checkpoint(back, folder / "part")


def test_auxiliary_heads_may_stay_on_disk(folder: Path) -> None:
    back = load_checkpoint(folder, aux=False, dtype=torch.bfloat16)
    assert back.aux_heads is None
    assert {parameter.dtype for parameter in back.parameters()} == {torch.bfloat16}
    assert_same(back.bank.values.detach(), make().bank.values.detach().bfloat16())


@pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS)
def test_configurations_survive_json(config) -> None:
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


WRONG_TENSORS = {
    "missing": ({"drop": ("final_norm.gain", "bank.sub_keys")}, r"2 tensors are missing: bank\.sub_keys, final_norm\.gain"),
    "surplus": ({"core.layers.9.norm1.gain": torch.ones(64)}, r"1 tensors .* not use: core\.layers\.9\.norm1\.gain"),
    "shape": ({"exit_heads.2.weight": torch.ones(65)}, r"exit_heads\.2\.weight is \[65\], not \[64\]"),
    "dtype": ({"exit_heads.2.weight": torch.ones(64, dtype=torch.int32)}, r"exit_heads\.2\.weight is I32"),
    "not finite": ({"exit_heads.2.weight": torch.full((64,), torch.inf)}, r"exit_heads\.2\.weight has values .* not finite"),
    "part of the heads": ({"drop": ("aux_heads.dfg.pair.weight",)}, r"aux_heads\.dfg\.pair\.weight"),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_wrong_tensors_are_named(folder: Path, name: str) -> None:
    changes, said = WRONG_TENSORS[name]
    change_tensors(folder, **changes)
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(folder)


WRONG_CONFIGS = {
    "layout": ({"trellis_layout": 2}, "trellis_layout = 2; this reads 1"),
    "architecture": ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    "surplus": ({"dropout_rate": 0.1}, "has dropout_rate"),
    "value": ({"heads": 3}, "heads = 3 is not a multiple"),
    "aux": ({"aux": {"height": 3}}, "height"),
    "list": ({"core": 6}, "config.json"),
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_wrong_configurations_are_named(folder: Path, name: str) -> None:
    changes, said = WRONG_CONFIGS[name]
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(folder)


def test_a_field_that_is_not_there_is_named(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["window"]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="lacks window"):
        load_checkpoint(folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load_checkpoint(folder)
