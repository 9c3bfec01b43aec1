"""How many bytes a sequence's state takes, from the spec alone. No torch: dtypes are names."""

from __future__ import annotations

from model.spec import ModelSpec

DTYPE_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch dtype name."""


def resolve_dtype(name: str, model_dtype: str) -> str:
    """A `StateSpec.dtype`: "model" stands for the model's own."""
    return model_dtype if name == "model" else name


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: str) -> int:
    """Bytes of one block of every layer's paged keys and values, in `dtype`."""
    return sum(cache.block_elements(block_size) for cache in spec.caches) * DTYPE_BYTES[dtype]


def bytes_per_slot(spec: ModelSpec, dtype: str) -> int:
    """Bytes of one slot of every recurrent state, where the model's dtype is `dtype`."""
    return sum(state.elements * DTYPE_BYTES[resolve_dtype(state.dtype, dtype)] for state in spec.states)
