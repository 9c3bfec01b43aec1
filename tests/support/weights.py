"""Applies a weight map to a folder's tensors in a few lines: what the loader must do, without how it does it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from model import share
from model.config import ModelConfig
from model.decoder import Decoder
from model.families.registry import build_model, resolve, weight_map
from model.layers.operators import Operators
from model.parallel import ExpertPlacement, Parallel
from tests.support.checkpoints import read_config


def load_rank(
    path: Path,
    rank: int = 0,
    world: int = 1,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    operators: Operators | None = None,
    split: bool = False,
    owned: bool = False,
) -> Decoder:
    """One rank's model, filled from the folder. GPU kernels, given as `operators`, want the row-major layout.

    With `split` the ranks divide its heads, with `owned` the sequences.
    """
    config, placement = placed(path, world)
    config = share.split(config, world) if split else share.own(config, world) if owned else config
    parallel = Parallel(rank, world)
    tensors = read_tensors(path)
    names = weight_map(config, placement, parallel, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    row_major = None if operators is None else True
    model = build_model(config, parallel, placement, dtype=dtype, device=device, row_major=row_major, operators=operators)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == names.pieces.keys()
    read = set()
    for name, pieces in names.pieces.items():
        padded = name in ("embedding", "head.weight.weight") or (split and name.endswith("out.bias"))
        parameters[name].fill_(0.0 if padded else torch.nan)
        for piece in pieces:
            tensor = tensors[piece.name]
            assert tuple(tensor.shape) == piece.shape, piece.name
            value = tensor[piece.source] if piece.source else tensor
            parameters[name][piece.target].copy_(value.mT if piece.transpose else value)
            read.add(piece.name)
        assert not parameters[name].isnan().any(), name
    for name in tensors:
        assert name in read or name in names.foreign or name.startswith(names.ignored), name
    return model


def placed(path: Path, world: int) -> tuple[ModelConfig, ExpertPlacement]:
    """The folder's configuration and its experts over `world` ranks."""
    config = resolve(read_config(path))
    return config, ExpertPlacement.build(config.moe.num_experts if config.moe else 0, world)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}
