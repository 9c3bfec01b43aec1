"""Small random checkpoints of the families with images, written by transformers, and transformers' answers for them.

All are float32 with patches of 4 x 4 pixels, 2 frames and a merge of 2, so that a prompt's row stands for 8 x 8 pixels. The text
parts are those of tests.support.checkpoints with three-part positions; none of the folders has a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import randomise

VOCAB = 320
IMAGE, VIDEO, VISION_START, VISION_END = 300, 301, 302, 303
PATCH, MERGE, FRAMES = 4, 2, 2
UNIT = PATCH * MERGE
"""Pixels of a side of what one row of a prompt stands for."""

_TEXT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 40,
    "intermediate_size": 56,
}
_MOE = {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
_VL = {
    **_TEXT,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]},
}
_HYBRID = {
    **_TEXT,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5},
}
_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 40,
    "num_position_embeddings": 36,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
}
_DEEPSTACK = {**_VISION, "deepstack_visual_indexes": [0, 2]}


@dataclass(frozen=True)
class _Variant:
    """transformers' classes are `stem`Config and `stem`ForConditionalGeneration."""

    stem: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    fused: bool = False
    """Experts of a layer in one tensor, as transformers keeps them, instead of the family's published layout."""
    turned: bool = False
    """The published layout has such tensors too, with rows and columns swapped."""


VARIANTS: dict[str, _Variant] = {
    "qwen3_vl": _Variant("Qwen3VL", {**_VL, "tie_word_embeddings": True}, _DEEPSTACK),
    "qwen3_vl_moe": _Variant("Qwen3VLMoe", {**_VL, **_MOE}, _DEEPSTACK, turned=True),
    "qwen3_vl_moe_fused": _Variant("Qwen3VLMoe", {**_VL, **_MOE}, _DEEPSTACK, fused=True),
    "qwen3_5": _Variant("Qwen3_5", _HYBRID, _VISION),
    "qwen3_5_moe": _Variant("Qwen3_5Moe", {**_HYBRID, **_MOE, "shared_expert_intermediate_size": 20}, _VISION),
    "qwen3_5_moe_fused": _Variant("Qwen3_5Moe", {**_HYBRID, **_MOE, "shared_expert_intermediate_size": 20}, _VISION, fused=True),
}
"""Name -> what its checkpoint is."""


@dataclass(frozen=True)
class Tokens:
    """The vocabulary and the ids that a checkpoint gives its vision tokens."""

    vocab_size: int = VOCAB
    image: int = IMAGE
    video: int = VIDEO
    start: int = VISION_START
    end: int = VISION_END


DEFAULT_TOKENS = Tokens()


def make_vision_checkpoint(name: str, path: Path, tokens: Tokens = DEFAULT_TOKENS) -> Path:
    """Write the checkpoint `name` of VARIANTS, with its processor's settings, into `path` unless it is there; returns `path`."""
    if (path / "config.json").exists():
        return path
    variant = VARIANTS[name]
    config = getattr(transformers, f"{variant.stem}Config")(
        text_config={**variant.text, "vocab_size": tokens.vocab_size},
        vision_config=dict(variant.vision),
        image_token_id=tokens.image,
        video_token_id=tokens.video,
        vision_start_token_id=tokens.start,
        vision_end_token_id=tokens.end,
        tie_word_embeddings=variant.text.get("tie_word_embeddings", False),
    )
    config.dtype = torch.float32
    model = getattr(transformers, f"{variant.stem}ForConditionalGeneration")(config).eval()
    randomise(model, seed=1000 + len(name))
    model.save_pretrained(path, save_original_format=not variant.fused)
    if variant.turned:
        weights = path / "model.safetensors"
        tensors = {name: tensor.mT if ".experts." in name else tensor for name, tensor in load_file(weights).items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights, metadata={"format": "pt"})
    for file, kind in (("preprocessor_config.json", "image"), ("video_preprocessor_config.json", "video")):
        (path / file).write_text(json.dumps(_processor(kind)))
    return path


PROCESSOR: dict[str, Any] = {
    "patch_size": PATCH,
    "temporal_patch_size": FRAMES,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": UNIT * UNIT * 2, "longest_edge": UNIT * UNIT * 64},
}
"""The settings that the published folders have, with this size of patches and with small limits."""


def _processor(kind: str) -> dict[str, Any]:
    common = PROCESSOR
    if kind == "image":
        return {**common, "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
    return {**common, "video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor"}


def pixels(height: int, width: int, frames: int = 1, seed: int = 0) -> torch.Tensor:
    """Random pixels, uint8 `[frames, height, width, 3]`."""
    generator = torch.Generator().manual_seed(100_000 * seed + 1000 * height + width)
    return torch.randint(0, 256, (frames, height, width, 3), generator=generator, dtype=torch.uint8)
