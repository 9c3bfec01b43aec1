"""Construction of a model from a configuration or a preset, on a device and in a dtype."""

from __future__ import annotations

from dataclasses import replace

import torch

from model.trellis.bank import WHOLE, Shard
from model.trellis.config import AuxHeadSpec, TrellisConfig
from model.trellis.model import TrellisModel
from model.trellis.presets import preset
from model.trellis.settings import ModelSettings

_PRESET_AUX = "preset"


def build_model(
    config: TrellisConfig,
    settings: ModelSettings | None = None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    shard: Shard = WHOLE,
) -> TrellisModel:
    """Construct and audit. Values follow from `seed` and each tensor's key; on the meta device there are none."""
    with torch.device(device):
        model = TrellisModel(config, settings, seed=seed, shard=shard)
    return model.to(dtype)


def build_preset_model(
    name: str,
    settings: ModelSettings | None = None,
    *,
    aux: AuxHeadSpec | str | None = _PRESET_AUX,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> TrellisModel:
    """`build_model` of a named preset, with its auxiliary heads, others, or none. Raises ModelConfigError for an unknown name."""
    config = preset(name)
    if not isinstance(aux, str):
        config = replace(config, aux=aux)
    return build_model(config, settings, seed=seed, device=device, dtype=dtype)
