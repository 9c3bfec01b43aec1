"""One rank's part of a decoder whose heads are divided among the ranks (attention layout `tensor`), as plain numbers. No torch.

With the layout `data` sequences are divided, and every rank has all heads.
Rank r of P has query heads `[r H/P, (r + 1) H/P)` and the key/value heads that these read, value heads of Gated DeltaNet layers and
their key heads, and the units `[r U/P, (r + 1) U/P)` of dense MLPs. Where there are fewer key/value heads than ranks, each is on
several ranks. Experts are placed as in every layout (`model.parallel`); routers and shared experts are on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from model.config import AttentionConfig, DeltaNetConfig, ModelConfig
from model.errors import UnsupportedModel
from model.spec import LayerKind


def split(config: ModelConfig, ranks: int) -> ModelConfig:
    """The configuration, to be divided among `ranks`. Raises UnsupportedModel naming every size that cannot be."""
    faults = _faults(config, ranks)
    if faults:
        raise UnsupportedModel(f"attention_layout 'tensor' on {ranks} ranks: {'; '.join(faults)}")
    return replace(config, split=ranks)


def own(config: ModelConfig, ranks: int) -> ModelConfig:
    """The configuration of a model whose sequences are divided among `ranks`: any that has one can be."""
    return replace(config, owners=ranks)


def share(config: ModelConfig) -> ModelConfig:
    """The same model in one rank's sizes, which are equal on all ranks. `split` stays, and says that outputs are partial sums."""
    ranks = config.split
    attention, delta = config.attention, config.delta
    return replace(
        config,
        attention=replace(attention, heads=attention.heads // ranks, kv_heads=held(attention.kv_heads, ranks)),
        delta=None
        if delta is None
        else replace(delta, key_heads=held(delta.key_heads, ranks), value_heads=delta.value_heads // ranks),
        intermediate_size=config.intermediate_size // ranks if _dense(config) else config.intermediate_size,
    )


def held(heads: int, ranks: int) -> int:
    """Of heads that several others read, those that one rank has: its part, or the one that all of its readers share."""
    return max(1, heads // ranks)


def part(count: int, rank: int, ranks: int) -> range:
    """Which of `count` heads or units a rank has."""
    own = held(count, ranks)
    start = rank * count // ranks
    return range(start, start + own)


def _dense(config: ModelConfig) -> bool:
    return not all(layer.sparse for layer in config.layers)


def _faults(config: ModelConfig, ranks: int) -> list[str]:
    """Sizes that do not divide, by their names in a config.json."""
    kinds = {layer.kind for layer in config.layers}
    sizes: list[tuple[str, int, bool]] = []
    if kinds - {LayerKind.LINEAR}:
        sizes += _attention_sizes(config.attention, ranks)
    if config.delta is not None and LayerKind.LINEAR in kinds:
        sizes += _delta_sizes(config.delta, ranks)
    if _dense(config):
        sizes.append(("intermediate_size", config.intermediate_size, config.intermediate_size % ranks == 0))
    return [f"{name} is {size}" for name, size, divides in sizes if not divides]


def _attention_sizes(shape: AttentionConfig, ranks: int) -> list[tuple[str, int, bool]]:
    return [
        ("num_attention_heads", shape.heads, shape.heads % ranks == 0),
        ("num_key_value_heads", shape.kv_heads, _spreads(shape.kv_heads, ranks)),
    ]


def _delta_sizes(shape: DeltaNetConfig, ranks: int) -> list[tuple[str, int, bool]]:
    return [
        ("linear_num_value_heads", shape.value_heads, shape.value_heads % ranks == 0),
        ("linear_num_key_heads", shape.key_heads, _spreads(shape.key_heads, ranks)),
    ]


def _spreads(heads: int, ranks: int) -> bool:
    """Whether each rank gets whole heads, or each head whole ranks."""
    return heads % ranks == 0 or ranks % heads == 0
