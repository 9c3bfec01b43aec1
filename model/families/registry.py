"""From an architecture's name to its family, and from a config.json to everything that the runtime needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from model.config import DeltaNetConfig, ModelConfig
from model.errors import UnsupportedModel
from model.families import llama, mixtral, qwen3, qwen3_5, qwen3_next, qwen3_vl
from model.families.common import Family
from model.families.fields import Json, eos_tokens
from model.families.weights import Manifest, Place
from model.parallel import ExpertPlacement, Parallel
from model.pieces import WeightMap
from model.spec import CacheSpec, LayerKind, ModelSpec, StateSpec
from model.vision.config import with_processors

if TYPE_CHECKING:
    import torch

    from model.decoder import Decoder
    from model.layers.operators import Operators

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mixtral.FAMILY,
    qwen3.FAMILY,
    qwen3_next.FAMILY,
    qwen3_5.FAMILY,
    qwen3_vl.FAMILY,
)


def supported() -> tuple[str, ...]:
    """Architectures that are served."""
    return tuple(name for family in FAMILIES for name in family.architectures)


def family_of(architecture: str) -> Family:
    """The family of an architecture. Raises UnsupportedModel naming it and what is served."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    raise UnsupportedModel(f"architecture {architecture!r} is not supported; supported: {', '.join(supported())}")


def resolve(
    config_json: Json, generation_config: Json | None = None, processors: Mapping[str, tuple[str, Json]] | None = None
) -> ModelConfig:
    """Read a config.json, the end tokens of a generation_config.json and, for images, the scale of pixels, or refuse by field.

    `processors` are the settings of the folder's `image_processor` and `video_processor`, each with the file that has them.
    """
    named = config_json.get("architectures")
    if not isinstance(named, list) or len(named) != 1:
        raise UnsupportedModel(f"config.json: architectures = {named!r} is not one name; supported: {', '.join(supported())}")
    config = family_of(named[0]).configure(config_json, named[0])
    if config.vision is not None:
        config = replace(config, vision=with_processors(config.vision, processors or {}))
    ends = eos_tokens(generation_config or {})
    return replace(config, eos_token_ids=ends) if ends else config


def build_model(
    config: ModelConfig,
    parallel: Parallel,
    placement: ExpertPlacement,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    row_major: bool | None = None,
    operators: Operators | None = None,
) -> Decoder:
    """The model of one rank, parameters without values on `device` ("meta" too).

    `row_major` is the memory layout of weights, by default that of the device: see `model.layers.linear.empty_weight`. `operators`
    are the kernels, by default torch's.
    """
    import torch

    from model.decoder import Decoder
    from model.layers.build import Build
    from model.layers.operators import TorchOperators

    device = torch.device(device)
    build = Build(dtype, device, device.type != "cpu" if row_major is None else row_major, operators or TorchOperators())
    return Decoder(config, spec_of(config), parallel, placement, build)


def weight_map(config: ModelConfig, placement: ExpertPlacement, parallel: Parallel, manifest: Manifest | None = None) -> WeightMap:
    """Which tensors this rank reads, and where they go.

    `manifest` (name -> shape of the folder's tensors) decides between layouts that a config.json does not tell apart; without it,
    the map is that of one tensor for each expert.
    """
    return family_of(config.architecture).weights(
        Place(config=config, placement=placement, parallel=parallel, manifest=manifest or {})
    )


def spec_of(config: ModelConfig) -> ModelSpec:
    """What scheduler, state registry and handshake need to know."""
    shape = config.attention
    caches = tuple(
        CacheSpec(layer=number, kv_heads=shape.kv_heads, head_dim=shape.head_dim, window=layer.window)
        for number, layer in enumerate(config.layers)
        if layer.kind is not LayerKind.LINEAR
    )
    states = tuple(
        state
        for number, layer in enumerate(config.layers)
        if layer.kind is LayerKind.LINEAR and config.delta is not None
        for state in delta_states(number, config.delta)
    )
    return ModelSpec(
        architecture=config.architecture,
        family=config.family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(config.layers),
        layer_kinds=tuple(layer.kind for layer in config.layers),
        caches=caches,
        states=states,
        num_experts=config.moe.num_experts if config.moe else 0,
        experts_per_token=config.moe.top_k if config.moe else 0,
        moe_layers=config.moe_layers,
        max_positions=config.max_positions,
        eos_token_ids=config.eos_token_ids,
        inputs=("text",) if config.vision is None else ("text", "image", "video"),
        vision=None if config.vision is None else config.vision.spec(),
    )


def delta_states(layer: int, shape: DeltaNetConfig) -> tuple[StateSpec, StateSpec]:
    """What a Gated DeltaNet layer keeps: the convolution's last inputs, and the matrix of each value head."""
    return (
        StateSpec(layer=layer, name="conv", shape=(shape.conv_width, shape.kernel - 1)),
        StateSpec(layer=layer, name="h", shape=(shape.value_heads, shape.key_dim, shape.value_dim), dtype="float32"),
    )
