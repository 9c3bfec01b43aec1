"""Qwen3.5, dense and MoE: hybrid layers whose text part may sit in `text_config`, with a vision tower that is left unread."""

from __future__ import annotations

from model.config import ModelConfig
from model.errors import UnsupportedModel
from model.families.common import Family, decoder_weights, routed
from model.families.delta_weights import delta_split
from model.families.fields import Json, whole
from model.families.hybrid import hybrid_config, hybrid_moe
from model.families.weights import Place
from model.pieces import WeightMap

DENSE = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
MOE = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")


def configure(config: Json, architecture: str) -> ModelConfig:
    """Read a Qwen3.5 config.json: text alone, or with vision beside it. In the MoE every layer is routed."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise UnsupportedModel(f"config.json: text_config of {architecture} is not an object")
    layers = whole(text, "num_hidden_layers")
    if architecture in DENSE:
        return hybrid_config(text, config, architecture, "qwen3_5", None, (False,) * layers)
    moe = hybrid_moe(text, normalise=True)
    if moe is None:
        raise UnsupportedModel(f"config.json of {architecture} has no num_experts")
    return hybrid_config(text, config, architecture, "qwen3_5_moe", routed(moe), (True,) * layers)


def weights(place: Place) -> WeightMap:
    """Text tensors lie below `model.language_model.` where there is a vision tower, else below `model.`."""
    return decoder_weights(
        place,
        prefixes=("model.language_model.", "model.", "language_model.model."),
        delta=delta_split,
        ignored=("mtp.", "model.mtp.", "model.visual.", "visual."),
    )


FAMILY = Family("qwen3_5", DENSE + MOE, configure, weights)
