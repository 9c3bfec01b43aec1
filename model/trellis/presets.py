"""Configurations by name."""

from __future__ import annotations

from dataclasses import replace

from model.trellis.config import GDN, AuxHeadSpec, TrellisConfig
from model.trellis.errors import ModelConfigError

_TRELLIS_180M = TrellisConfig()
_TRELLIS_NANO = TrellisConfig(
    d_model=64, vocab_size=256, heads=4, head_dim=16, window=8, mlp_dim=128, gdn_heads=4, gdn_key_dim=16, gdn_value_dim=24,
    lora_rank=4, bank_sub_keys=16, bank_value_dim=32, bank_key_dim=16, bank_top_k=4, context=64,
    aux=AuxHeadSpec(width=64, ast_labels=16, type_labels=32, dfg_width=16),
)  # fmt: skip
PRESETS = {
    "trellis-180m": _TRELLIS_180M,
    "trellis-180m-nosliding": replace(_TRELLIS_180M, core=(GDN,) * 6),
    "trellis-nano": _TRELLIS_NANO,
}
"""Configurations by name. `trellis-nano` has the shape of the large ones at toy widths."""


def preset(name: str) -> TrellisConfig:
    """The configuration of that name. Raises ModelConfigError naming the ones there are."""
    if name not in PRESETS:
        raise ModelConfigError(f"there is no preset {name!r}; presets: {', '.join(PRESETS)}")
    return PRESETS[name]
