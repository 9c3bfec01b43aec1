"""The vision demo's folder without its weights: configuration of a tiny Qwen3-VL-MoE, its processors' settings, and its texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ep_runtime.demo.tokenizer import token_ids
from ep_runtime.demo.vision_text import END, IMAGE, MAX_LENGTH, PAD, VIDEO, VISION_END, VISION_START, write_text

PATCH, MERGE, FRAMES = 8, 2, 2
UNIT = PATCH * MERGE
"""Pixels of a side of what one row of the prompt stands for."""
HIDDEN = 64

TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_heads": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 36,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
    "deepstack_visual_indexes": [0],
}
CUT: dict[str, Any] = {
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": FRAMES,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 4 * UNIT**2, "longest_edge": 8 * UNIT**2},
}
"""Settings that the processors of images and of videos share: a picture becomes 4 to 8 rows of the prompt."""
PROCESSOR = {"processor_class": "Qwen3VLProcessor"}


def vision_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the tokens around and in the place of images and videos, under the configuration's names."""
    return token_ids(
        tokenizer,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )


def end_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the tokens that begin, end and fill a text, likewise."""
    return token_ids(tokenizer, bos_token_id=PAD, eos_token_id=END, pad_token_id=PAD)


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """`config.json`, with the ids of this tokenizer's tokens."""
    text = {"model_type": "qwen3_vl_moe_text", "dtype": "float32", "vocab_size": tokenizer.get_vocab_size()}
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "dtype": "float32",
        "tie_word_embeddings": False,
        "text_config": text | TEXT | end_ids(tokenizer),
        "vision_config": {"model_type": "qwen3_vl_moe_vision"} | VISION,
        **vision_ids(tokenizer),
    }


def write_folder(folder: Path, tokenizer: Tokenizer) -> None:
    """Write everything but the weights into the existing `folder`."""
    write_text(folder, tokenizer)
    files: dict[str, dict[str, Any]] = {
        "config.json": model_config(tokenizer),
        "generation_config.json": {"do_sample": False} | end_ids(tokenizer),
        "preprocessor_config.json": CUT | PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": CUT | PROCESSOR | {"video_processor_type": "Qwen3VLVideoProcessor"},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
