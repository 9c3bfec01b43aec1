"""Weights of towers: rank 0 reads them, the others know their names; what is wrong is named; dummy weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.errors import CheckpointError
from model.loader import PreparedModel, load_model, prepare_model
from model.parallel import Parallel
from model.vision.patches import ImagePixels
from tests.support.batches import Ranks
from tests.support.checkpoints import read_config
from tests.support.vision_checkpoints import UNIT, VARIANTS, pixels
from tests.support.weights import load_rank

Folders = Callable[[str], Path]


def changed(source: Path, target: Path, *, without: str = "", added: Mapping[str, torch.Tensor] | None = None) -> Path:
    """A copy of a folder with other tensors, named below `model.visual`."""
    copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    tensors.pop(f"model.visual.{without}", None)
    save_file(tensors | {f"model.visual.{name}": tensor for name, tensor in (added or {}).items()}, target / "model.safetensors")
    return target


def prepare(path: Path, rank: int = 0, world: int = 1) -> PreparedModel:
    return prepare_model(path, Parallel(rank, world), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loader_fills_the_tower(vision_folder: Folders, name: str) -> None:
    path = vision_folder(name)
    loaded = load_model(path, Parallel(0, 2), dtype=torch.float32, device="cpu", progress=False)
    right = dict(load_rank(path, 0, 2).named_parameters())
    for parameter, value in loaded.model.named_parameters():
        assert torch.equal(value, right[parameter]), parameter
    assert loaded.spec.vision is not None


def test_the_other_ranks_have_no_tower(vision_folder: Folders) -> None:
    """Their plan has no bytes for it; all ranks have the same spec."""
    path = vision_folder("qwen3_vl_moe")
    head, worker = (prepare(path, rank, 2) for rank in range(2))
    visual = {name: tensor for name, tensor in load_file(path / "model.safetensors").items() if ".visual." in name}
    assert head.weight_bytes - worker.weight_bytes == sum(tensor.nbytes for tensor in visual.values())
    assert worker.module.tower is None
    assert head.spec == worker.spec
    read = {piece.name for pieces in worker.weight_map.pieces.values() for piece in pieces}
    assert not read & visual.keys()
    assert worker.load(progress=False).report.nbytes == worker.weight_bytes


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_and_surplus_tensors_are_named_on_every_rank(vision_folder: Folders, tmp_path: Path, rank: int) -> None:
    source = vision_folder("qwen3_vl")
    missing, surplus = "deepstack_merger_list.1.norm.bias", "blocks.3.norm1.bias"
    with pytest.raises(CheckpointError, match=f"1 tensors are missing: model.visual.{missing}"):
        prepare(changed(source, tmp_path / "missing", without=missing), rank, 2)
    with pytest.raises(CheckpointError, match=f"does not use: model.visual.{surplus}"):
        prepare(changed(source, tmp_path / "surplus", added={surplus: torch.ones(32)}), rank, 2)


def test_a_wrong_shape_is_named(vision_folder: Folders, tmp_path: Path) -> None:
    path = changed(vision_folder("qwen3_5"), tmp_path / "shape", added={"pos_embed.weight": torch.ones(25, 32)})
    with pytest.raises(CheckpointError, match=r"model\.visual\.pos_embed\.weight is \[25, 32\], not \[36, 32\]"):
        prepare(path)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl"])
def test_text_alone_leaves_the_tower_unread(vision_folder: Folders, tmp_path: Path, name: str) -> None:
    """A configuration without a vision_config beside the tensors of a tower: the same text, and no tower."""
    path = changed(vision_folder(name), tmp_path / "text")
    config = {key: value for key, value in read_config(path).items() if key != "vision_config"}
    (path / "config.json").write_text(json.dumps(config))
    assert prepare(path).module.tower is None
    ids = [5, 6, 250, 3]
    assert torch.equal(Ranks(path).prompt(0, ids), Ranks(vision_folder(name)).prompt(0, ids))


def test_dummy_weights(vision_folder: Folders, tmp_path: Path) -> None:
    """They need a config.json alone, and rows of an image are numbers that depend on the image."""
    (tmp_path / "config.json").write_bytes((vision_folder("qwen3_vl") / "config.json").read_bytes())
    loaded = load_model(tmp_path, Parallel(0, 1), dtype=torch.float32, device="cpu", load_format="dummy", progress=False)
    tower = loaded.model.tower
    assert tower is not None
    assert float(tower.merger.norm.weight.mean()) == 1.0
    assert float(tower.merger.norm.bias.abs().max()) == 0.0
    images = [ImagePixels(frames=1, height=2, width=2, pixels=pixels(2 * UNIT, 2 * UNIT, seed=seed)) for seed in range(2)]
    with torch.inference_mode():
        encoding = tower.begin(images)
        tower.advance(encoding, encoding.remaining_layers)
        first, second = tower.rows(encoding)
    assert bool(first.isfinite().all())
    assert not torch.equal(first, second)
    loaded.close()
    assert all(parameter.is_meta for parameter in tower.parameters())
