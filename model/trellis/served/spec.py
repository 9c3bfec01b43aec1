"""What the rest of the runtime may know of a Trellis model, and the names of what its sequences keep.

Layers have the numbers of the unique ones, in order: prelude, core, coda. A core layer's recurrent states differ by loop, so their
names carry it; its cache is one for all loops.
"""

from __future__ import annotations

from collections.abc import Iterator

from model.spec import CacheSpec, LayerKind, ModelSpec, StateSpec
from model.trellis.checkpoint import ARCHITECTURE, MODEL_TYPE
from model.trellis.config import GDN, GLOBAL, SLIDING, TrellisConfig

_KINDS = {GDN: LayerKind.LINEAR, GLOBAL: LayerKind.FULL, SLIDING: LayerKind.SLIDING}


def trellis_spec(config: TrellisConfig, eos: tuple[int, ...] = ()) -> ModelSpec:
    """Sizes, layer kinds, caches and states. A sequence may be as long as those of the training."""
    return ModelSpec(
        architecture=ARCHITECTURE,
        family=MODEL_TYPE,
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_layers=len(config.layers),
        layer_kinds=tuple(_KINDS[kind] for kind in config.layers),
        caches=tuple(
            CacheSpec(
                layer=number,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                window=config.window if kind == SLIDING else None,
            )
            for number, kind in enumerate(config.layers)
            if kind != GDN
        ),
        states=tuple(state for number, kind in enumerate(config.layers) if kind == GDN for state in _states(config, number)),
        max_positions=config.context,
        eos_token_ids=eos,
        max_loops=config.k_max,
    )


def state_names(loop: int) -> tuple[str, str]:
    """Names of a recurrent layer's convolution inputs and matrices: of a loop from 1 on, or of loop 0, outside the core."""
    return ("conv", "h") if loop == 0 else (f"conv.{loop}", f"h.{loop}")


def _states(config: TrellisConfig, number: int) -> Iterator[StateSpec]:
    """Of one recurrent layer: convolution inputs in the model's dtype, oldest first, and matrices in float32, for each loop."""
    inside = len(config.prelude) <= number < len(config.prelude) + len(config.core)
    for loop in range(1, config.k_max + 1) if inside else (0,):
        conv, h = state_names(loop)
        yield StateSpec(layer=number, name=conv, shape=(config.gdn_channels, config.gdn_conv - 1))
        yield StateSpec(layer=number, name=h, shape=(config.gdn_heads, config.gdn_key_dim, config.gdn_value_dim), dtype="float32")
