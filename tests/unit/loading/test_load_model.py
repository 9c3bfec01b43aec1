"""The whole loader on folders that transformers saved: every rank's experts against the reference model's own parameters."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from model.errors import CheckpointError, UnsupportedModel
from model.families.registry import build_model
from model.folder import INDEX, read_manifest
from model.loader import LoadedModel, load_model, prepare_model
from model.parallel import Parallel

EXPERTS, LAYERS, VOCAB, INNER = 10, 2, 67, 24


@pytest.fixture(scope="module")
def reference() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    return MixtralForCausalLM(config).to(torch.bfloat16)


@pytest.fixture(scope="module")
def saved(reference: MixtralForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    reference.save_pretrained(folder, max_shard_size="20KB")
    assert (folder / INDEX).is_file()
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to be broken."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def load(folder: Path, rank: int = 0, world: int = 1, **options: object) -> LoadedModel:
    return load_model(folder, Parallel(rank, world), dtype=torch.bfloat16, device="cpu", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [1, 4, 12])
def test_the_ranks_together_hold_the_reference(reference: MixtralForCausalLM, saved: Path, world: int) -> None:
    ranks = [load(saved, rank, world) for rank in range(world)]
    for layer in range(LAYERS):
        moe = [loaded.model.get_submodule(f"layers.{layer}.moe") for loaded in ranks]
        theirs = reference.model.layers[layer].mlp.experts
        assert torch.equal(torch.cat([module.gate_up.dequantize() for module in moe]), theirs.gate_up_proj)
        assert torch.equal(torch.cat([module.down.dequantize() for module in moe]), theirs.down_proj)
    head = torch.cat([loaded.model.get_parameter("head.weight.weight") for loaded in ranks])
    assert torch.equal(head[:VOCAB], reference.lm_head.weight)
    assert not head[VOCAB:].any()
    for loaded in ranks:
        assert torch.equal(loaded.model.get_parameter("embedding"), reference.model.embed_tokens.weight)
        assert loaded.placement == ranks[0].placement
        assert loaded.spec == ranks[0].spec
        assert loaded.report.nbytes == sum(tensor.nbytes for tensor in loaded.model.parameters()) - padding(loaded.model)


def padding(model: nn.Module) -> int:
    """Bytes of the head's rows of zeros."""
    rows = model.get_parameter("head.weight.weight")
    return sum(row.nbytes for row in rows if not row.any())


def test_the_size_is_known_before_anything_is_read(folder: Path) -> None:
    prepared = prepare_model(folder, Parallel(1, 4), dtype=torch.bfloat16, device="cpu")
    assert all(parameter.is_meta for parameter in prepared.module.parameters())
    planned = prepared.weight_bytes
    loaded = prepared.load()
    assert planned == sum(tensor.nbytes for tensor in loaded.model.parameters())


def test_weights_lie_in_memory_as_a_model_built_on_the_device_has_them(saved: Path) -> None:
    prepared = prepare_model(saved, Parallel(0, 2), dtype=torch.bfloat16, device="cpu")
    there = build_model(prepared.config, Parallel(0, 2), prepared.placement, dtype=torch.bfloat16, device="cpu")
    strides = {name: parameter.stride() for name, parameter in there.named_parameters()}
    loaded = prepared.load()
    assert {name: parameter.stride() for name, parameter in loaded.model.named_parameters()} == strides
    prepared = prepare_model(saved, Parallel(0, 2), dtype=torch.bfloat16, device="cuda")
    assert all(parameter.is_contiguous() for parameter in prepared.module.parameters())


def test_a_dense_model_with_tied_embeddings(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    theirs = LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path)
    for rank in range(3):
        loaded = load_model(tmp_path, Parallel(rank, 3), dtype=torch.float32, device="cpu")
        embedding = loaded.model.get_parameter("embedding")
        assert torch.equal(embedding[:VOCAB], theirs.model.embed_tokens.weight)
        assert not embedding[VOCAB:].any()
        assert loaded.spec.num_experts == 0


@pytest.mark.parametrize("rank", [0, 3])
def test_broken_folders_are_refused_by_name_on_every_rank(folder: Path, rank: int) -> None:
    manifest = read_manifest(folder)
    name = next(name for name in manifest if ".experts.7." in name)
    file = folder / manifest[name].file
    whole = load_file(file)
    data = file.read_bytes()

    file.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=f"{file.name}: truncated: tensor"):
        load(folder, rank, 4)
    save_file({key: tensor for key, tensor in whole.items() if key != name}, file)
    with pytest.raises(CheckpointError, match=rf"puts tensor {name} into {file.name}"):
        load(folder, rank, 4)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"1 tensors are missing: {name}"):
        load(folder, rank, 4)
    save_file(whole | {"model.layers.0.extra": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match=r"does not use: model\.layers\.0\.extra"):
        load(folder, rank, 4)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"names {file.name}, which is not in the folder"):
        load(folder, rank, 4)


def test_a_value_that_is_not_finite_is_refused_by_name(folder: Path) -> None:
    manifest = read_manifest(folder)
    name = next(name for name in manifest if "layers.1" in name and "o_proj" in name)
    file = folder / manifest[name].file
    tensors = load_file(file)
    tensors[name][3, 5] = float("nan")
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"{name} holds values that are not finite"):
        load(folder)


def test_quantised_folders_are_refused_before_their_files_are_looked_at(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UnsupportedModel, match="awq"):
        load(folder)


@pytest.mark.parametrize("world", [1, 4])
def test_dummy_weights_need_a_config_alone(saved: Path, tmp_path: Path, world: int) -> None:
    shutil.copy(saved / "config.json", tmp_path)
    alone = load(tmp_path, load_format="dummy", seed=3)
    ranks = [load(tmp_path, rank, world, load_format="dummy", seed=3) for rank in range(world)]
    for name in ("layers.1.moe.gate_up.weight", "layers.0.moe.down.weight"):
        assert torch.equal(torch.cat([loaded.model.get_parameter(name) for loaded in ranks]), alone.model.get_parameter(name))
    for loaded in ranks:
        for name, parameter in loaded.model.named_parameters():
            if "moe.gate_up" not in name and "moe.down" not in name and name != "head.weight.weight":
                assert torch.equal(parameter, alone.model.get_parameter(name)), name
            if "norm" in name:
                assert bool((parameter == 1).all())
            else:
                assert parameter.abs().max() <= 1.001e-3
    assert alone.report.load_format == "dummy"


def test_progress_is_shown_when_asked(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(saved)
    assert capsys.readouterr().err == ""
    load(saved, 1, 2, progress="always")
    assert capsys.readouterr().err == ""
    load(saved, 0, 2, progress="always")
    assert "100%" in capsys.readouterr().err


def test_close_gives_the_weights_back(saved: Path) -> None:
    loaded = load(saved)
    names = [name for name, _ in loaded.model.named_parameters()]
    gone: list[str] = []
    for name in names:
        weakref.finalize(loaded.model.get_parameter(name), gone.append, name)
    gc.disable()
    try:
        loaded.close()
    finally:
        gc.enable()
    assert gone == names[::-1]
