"""From an architecture's name to its family, and from a config.json to everything that the runtime needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from model.config import FamilyConfig
from model.errors import UnsupportedModel
from model.families import llama, mixtral, qwen3, qwen3_5, qwen3_next, qwen3_vl, trellis
from model.families.family import Family, RankModule
from model.families.fields import Json, eos_tokens
from model.families.weights import Manifest, PlaceOf
from model.layers.build import Build
from model.layers.operators import Operators, TorchOperators
from model.parallel import ExpertPlacement, Parallel
from model.pieces import WeightMap
from model.spec import ModelSpec
from model.vision.config import with_processors

FAMILIES: tuple[Family[Any], ...] = (
    llama.FAMILY,
    mixtral.FAMILY,
    qwen3.FAMILY,
    qwen3_next.FAMILY,
    qwen3_5.FAMILY,
    qwen3_vl.FAMILY,
    trellis.FAMILY,
)
"""Each knows the type of its own configurations; the functions below pass on what `resolve` gave."""


def supported() -> tuple[str, ...]:
    """Architectures that are served."""
    return tuple(name for family in FAMILIES for name in family.architectures)


def family_of(architecture: str) -> Family[Any]:
    """The family of an architecture. Raises UnsupportedModel naming it and what is served."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    raise UnsupportedModel(f"architecture {architecture!r} is not supported; supported: {', '.join(supported())}")


def resolve(
    config_json: Json, generation_config: Json | None = None, processors: Mapping[str, tuple[str, Json]] | None = None
) -> FamilyConfig:
    """Read a config.json, the end tokens of a generation_config.json and, for images, the scale of pixels, or refuse by field.

    `processors` are the settings of the folder's `image_processor` and `video_processor`, each with the file that has them.
    """
    named = config_json.get("architectures")
    if not isinstance(named, list) or len(named) != 1:
        raise UnsupportedModel(f"config.json: architectures = {named!r} is not one name; supported: {', '.join(supported())}")
    config: FamilyConfig = family_of(named[0]).configure(config_json, named[0])
    if config.vision is not None:
        config = replace(config, vision=with_processors(config.vision, processors or {}))
    ends = eos_tokens(generation_config or {})
    return replace(config, eos_token_ids=ends) if ends else config


def spec_of(config: FamilyConfig) -> ModelSpec:
    """What scheduler, state registry and handshake need to know."""
    return family_of(config.architecture).spec(config)


def weight_map(config: FamilyConfig, placement: ExpertPlacement, parallel: Parallel, manifest: Manifest | None = None) -> WeightMap:
    """Which tensors this rank reads, and where they go.

    `manifest` (name -> shape of the folder's tensors) decides between layouts that a config.json does not tell apart; without it,
    the map is that of one tensor for each expert.
    """
    place = PlaceOf(config=config, placement=placement, parallel=parallel, manifest=manifest or {})
    return family_of(config.architecture).weights(place)


def build_model(
    config: FamilyConfig,
    parallel: Parallel,
    placement: ExpertPlacement,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    row_major: bool | None = None,
    operators: Operators | None = None,
) -> RankModule:
    """The model of one rank, parameters without values on `device` ("meta" too).

    `row_major` is the memory layout of weights, by default that of the device: see `model.layers.linear.empty_weight`. `operators`
    are the kernels, by default torch's.
    """
    device = torch.device(device)
    build = Build(dtype, device, device.type != "cpu" if row_major is None else row_major, operators or TorchOperators())
    return family_of(config.architecture).build(config, parallel, placement, build)
