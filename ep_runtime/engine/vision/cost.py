"""How much of an encoding goes between two steps: half of what the longest piece of a prompt costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model.spec import LayerKind

if TYPE_CHECKING:
    from model.config import LayerConfig, ModelConfig


SLICE_SHARE = 0.5
"""Of a prompt piece. A stream sees less of a piece than what it takes: the step before is read only once the piece's kernels are
launched, and its time covers theirs. A slice's few kernels are launched at once, and its time lies in one gap. Besides, two slices
may lie between two steps of a stream that waits for a grammar's mask."""


def slice_cost(config: ModelConfig, rows: int, ranks: int) -> float:
    """The most floating point operations of a slice of encoding where a prompt piece has up to `rows` rows on `ranks` ranks."""
    return SLICE_SHARE * chunk_cost(config, rows, ranks)


def chunk_cost(config: ModelConfig, rows: int, ranks: int = 1) -> float:
    """An estimate of the floating point operations of a prompt piece of `rows` rows: two for each weight that a row meets.

    On one of `ranks` ranks, among which experts are divided. Attention over earlier positions, norms and logits are left out.
    """
    return 2.0 * rows * sum(_active(config, layer, ranks) for layer in config.layers)


def _active(config: ModelConfig, layer: LayerConfig, ranks: int) -> float:
    """Weights of one layer that a row meets on one rank, on average."""
    hidden, attention, delta, moe = config.hidden_size, config.attention, config.delta, config.moe
    if layer.kind is LayerKind.LINEAR and delta is not None:
        mixer = hidden * (delta.conv_width + 2 * delta.value_width + 2 * delta.value_heads)
    else:
        width, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        mixer = hidden * (width * (3 if attention.output_gate else 2) + 2 * kv)
    if layer.sparse and moe is not None:
        return mixer + hidden * (moe.num_experts + 3 * (moe.top_k * moe.intermediate / ranks + moe.shared_intermediate))
    return mixer + 3 * hidden * config.intermediate_size
