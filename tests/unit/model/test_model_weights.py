"""Weight maps: which tensors a rank reads, in every layout that a folder may have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model.families.registry import resolve, weight_map
from model.parallel import ExpertPlacement, Parallel
from tests.support.batches import Ranks
from tests.support.checkpoints import prompt, read_config
from tests.support.weights import placed, read_tensors


def rewrite(source: Path, target: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    """A folder with other tensors and the configuration of `source`, with `config` changed."""
    target.mkdir()
    (target / "config.json").write_text(json.dumps(read_config(source) | config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def logits(path: Path, world: int = 1) -> torch.Tensor:
    return Ranks(path, world).prompt(0, prompt(20))


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("family", "variant"), [("qwen3_moe", "fused"), ("mixtral", "fused")])
def test_transposed_experts(checkpoint: Callable[[str, str], Path], tmp_path: Path, family: str, variant: str, world: int) -> None:
    source = checkpoint(family, variant)
    tensors = {name: tensor.mT if ".experts." in name else tensor for name, tensor in read_tensors(source).items()}
    assert torch.equal(logits(rewrite(source, tmp_path / "turned", tensors), world), logits(source, world))


def test_experts_apart_and_together(checkpoint: Callable[[str, str], Path], tmp_path: Path) -> None:
    source = checkpoint("qwen3_moe", "fused")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in read_tensors(source).items():
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensors[name] = tensor
            continue
        root, part = name.rsplit(".", 1)
        for expert, matrix in enumerate(tensor):
            halves = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True) if part == "gate_up_proj" else [(part, matrix)]
            tensors |= {f"{root}.{expert}.{half}.weight": rows for half, rows in halves}
    assert torch.equal(logits(rewrite(source, tmp_path / "apart", tensors)), logits(source))


def test_tensors_that_are_known_and_left(checkpoint: Callable[[str, str], Path], tmp_path: Path) -> None:
    """A head beside a tied embedding, rotary buffers, multi-token prediction and a vision tower."""
    source = checkpoint("llama", "llama3")
    extra = {"lm_head.weight": torch.ones(131, 48), "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert torch.equal(logits(rewrite(source, tmp_path / "tied", read_tensors(source) | extra)), logits(source))
    source = checkpoint("qwen3_5_moe", "vision")
    assert any(name.startswith("model.visual.") for name in read_tensors(source))
    extra = {"mtp.layers.0.input_layernorm.weight": torch.ones(40)}
    assert torch.equal(logits(rewrite(source, tmp_path / "mtp", read_tensors(source) | extra)), logits(source))


@pytest.mark.parametrize(("family", "variant"), [("mixtral", "plain"), ("qwen3_5_moe", "fused"), ("qwen3_next", "mixed")])
@pytest.mark.parametrize("world", [1, 4, 12])
def test_ranks_read_every_tensor_once_in_all(checkpoint: Callable[[str, str], Path], family: str, variant: str, world: int) -> None:
    """Each expert's elements go to one rank, each row of the head too; a rank knows the names that only others read."""
    path = checkpoint(family, variant)
    config, placement = placed(path, world)
    shapes = {name: tuple(tensor.shape) for name, tensor in read_tensors(path).items()}
    maps = [weight_map(config, placement, Parallel(rank, world), shapes) for rank in range(world)]
    counts = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    for rank_map in maps:
        for piece in (piece for pieces in rank_map.pieces.values() for piece in pieces):
            counts[piece.name][piece.source or ...] += 1
    for name, count in counts.items():
        shared = ".experts." not in name and not name.startswith("lm_head")
        assert count.min() == count.max() == (world if shared else 1), name
    for rank_map in maps:
        read = {piece.name for pieces in rank_map.pieces.values() for piece in pieces}
        assert read | rank_map.foreign == shapes.keys()
        assert not read & rank_map.foreign


def test_without_a_manifest_experts_are_apart(checkpoint: Callable[[str, str], Path]) -> None:
    config = resolve(read_config(checkpoint("mixtral", "plain")))
    pieces = weight_map(config, ExpertPlacement.build(10, 2), Parallel(1, 2)).pieces["layers.0.moe.gate_up.weight"]
    assert pieces[0].name == "model.layers.0.block_sparse_moe.experts.5.w1.weight"
    assert (pieces[0].shape, pieces[0].target) == ((24, 40), (0, slice(0, 24)))
