"""Qwen3.5, dense and MoE: hybrid layers, with a vision tower beside them or text alone."""

from __future__ import annotations

from dataclasses import replace

from model.config import ModelConfig
from model.errors import UnsupportedModel
from model.families.common import decoder_weights, routed
from model.families.decoders import decoder_family
from model.families.delta_weights import delta_split
from model.families.fields import Json, whole
from model.families.hybrid import hybrid_config, hybrid_moe
from model.families.vision import text_part, vision_part, vision_weights
from model.families.weights import Place
from model.pieces import WeightMap

DENSE = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
MOE = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
SECTIONS = (11, 11, 10)
"""Frequencies of each part of a position where the configuration names none."""


def configure(config: Json, architecture: str) -> ModelConfig:
    """Read a Qwen3.5 config.json: text alone, or in `text_config` with vision beside it. In the MoE every layer is routed."""
    text = text_part(config, architecture)
    layers = whole(text, "num_hidden_layers")
    if architecture in DENSE:
        model = hybrid_config(text, config, architecture, "qwen3_5", None, (False,) * layers, SECTIONS)
    else:
        moe = hybrid_moe(text, normalise=True)
        if moe is None:
            raise UnsupportedModel(f"config.json of {architecture} has no num_experts")
        model = hybrid_config(text, config, architecture, "qwen3_5_moe", routed(moe), (True,) * layers, SECTIONS)
    return replace(model, vision=vision_part(config, model, deepstack=False))


def weights(place: Place) -> WeightMap:
    """Text tensors lie below `model.language_model.` where there is a vision tower, else below `model.`."""
    return decoder_weights(
        place,
        prefixes=("model.language_model.", "model.", "language_model.model."),
        delta=delta_split,
        ignored=("mtp.", "model.mtp."),
        more=vision_weights,
    )


FAMILY = decoder_family("qwen3_5", DENSE + MOE, configure, weights)
