"""Bytes of blocks and slots, by hand."""

from __future__ import annotations

from model.spec import CacheSpec, LayerKind, ModelSpec, StateSpec
from model.state.sizes import bytes_per_block, bytes_per_slot

SPEC = ModelSpec(
    architecture="Hybrid",
    family="hybrid",
    vocab_size=100,
    hidden_size=32,
    num_layers=3,
    layer_kinds=(LayerKind.LINEAR, LayerKind.FULL, LayerKind.FULL),
    caches=(CacheSpec(layer=1, kv_heads=2, head_dim=8), CacheSpec(layer=2, kv_heads=1, head_dim=4)),
    states=(
        StateSpec(layer=0, name="conv", shape=(6, 3)),
        StateSpec(layer=0, name="h", shape=(2, 4, 4), dtype="float32"),
    ),
    max_positions=64,
)


def test_block_and_slot_bytes() -> None:
    # Keys and values: 2 x 16 positions x (2 x 8 + 1 x 4) elements.
    assert bytes_per_block(SPEC, 16, "bfloat16") == 2 * 16 * 20 * 2
    assert bytes_per_block(SPEC, 16, "float32") == 2 * 16 * 20 * 4
    # conv 18 elements in the model's dtype, h 32 elements in float32.
    assert bytes_per_slot(SPEC, "bfloat16") == 18 * 2 + 32 * 4
    assert bytes_per_slot(SPEC, "float32") == 18 * 4 + 32 * 4
