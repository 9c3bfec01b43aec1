"""What families of decoders have in common: one spec, one module and one accounting follow from a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Callable

from model.config import DeltaNetConfig, ModelConfig
from model.decoder import Decoder
from model.families.family import Family
from model.families.fields import Json
from model.families.shares import share_weights
from model.families.weights import Place
from model.layers.build import Build
from model.parallel import ExpertPlacement, Parallel
from model.pieces import WeightMap
from model.reads import WeightBytes
from model.scratch import step_bytes
from model.share import own, share, split
from model.spec import CacheSpec, LayerKind, ModelSpec, StateSpec
from model.state.sizes import DTYPE_BYTES


def decoder_family(
    name: str,
    architectures: tuple[str, ...],
    configure: Callable[[Json, str], ModelConfig],
    weights: Callable[[Place], WeightMap],
) -> Family[ModelConfig]:
    """A family that `model.decoder.Decoder` runs: it says how a config.json is read, and how tensors are named."""
    return Family(
        name=name,
        architectures=architectures,
        configure=configure,
        spec=decoder_spec,
        weights=lambda place: share_weights(weights(place), place.config, place.parallel.rank),
        build=build_decoder,
        scratch=lambda config, size: step_bytes(share(config), size),
        reads=decoder_reads,
        split=split,
        own=own,
    )


def build_decoder(config: ModelConfig, parallel: Parallel, placement: ExpertPlacement, build: Build) -> Decoder:
    """One rank's module, parameters without values."""
    return Decoder(share(config), decoder_spec(config), parallel, placement, build)


def decoder_spec(config: ModelConfig) -> ModelSpec:
    """What scheduler, state registry and handshake need to know; caches and states are those of one rank."""
    config = share(config)
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
        for state in delta_states(number, config.delta, divided=max(config.split, config.owners) > 1)
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


def delta_states(layer: int, shape: DeltaNetConfig, *, divided: bool = False) -> tuple[StateSpec, StateSpec]:
    """What a Gated DeltaNet layer keeps: the convolution's last inputs, and the matrix of each value head."""
    return (
        StateSpec(layer=layer, name="conv", shape=(shape.conv_width, shape.kernel - 1), divided=divided),
        StateSpec(
            layer=layer, name="h", shape=(shape.value_heads, shape.key_dim, shape.value_dim), dtype="float32", divided=divided
        ),
    )


def decoder_reads(config: ModelConfig, parallel: Parallel, placement: ExpertPlacement, nbytes: int, dtype: str) -> WeightBytes:
    """Split `nbytes`, all weights of one rank in `dtype`. The embedding is not among the parts: a step reads a row a sequence."""
    row = config.hidden_size * DTYPE_BYTES[dtype]
    shard = parallel.vocab_shard(config.vocab_size) * row
    ends = parallel.world * shard if config.tied else config.vocab_size * row + shard
    expert = 3 * config.moe.intermediate * row if config.moe is not None else 0
    held = len(placement.local(parallel.rank)) * len(config.moe_layers)
    return WeightBytes(expert=expert, head=shard, dense=nbytes - ends - held * expert)
