"""A model folder for the frontend alone whose model takes images and videos: text files, and the processors' settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PATCH, MERGE, FRAMES = 4, 2, 2
UNIT = PATCH * MERGE
CUT = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": FRAMES}
IMAGE = {**CUT, "size": {"shortest_edge": 256, "longest_edge": 4096}, "image_processor_type": "Qwen2VLImageProcessorFast"}
VIDEO = {**CUT, "size": {"shortest_edge": 512, "longest_edge": 8192}, "video_processor_type": "Qwen3VLVideoProcessor"}

TEMPLATE = """
{%- macro write(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'system' %}{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}
{%- else %}{{ write(message.content) }}{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_vision_text_model(folder: Path, *, image: dict[str, Any] | None = None, video: dict[str, Any] | None = None) -> Path:
    """Fill `folder`; returns it. `image` and `video` replace the processors' settings."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["user assistant system tool", "<0.5 seconds><1.5 seconds>", "What is in it?"], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    ids = {token: backend.token_to_id(token) for token in SPECIALS}
    config = {
        "model_type": "qwen3_vl_moe",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_config": {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": FRAMES},
    }
    for name, value in {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE},
        "config.json": config,
        "preprocessor_config.json": IMAGE if image is None else image,
        "video_preprocessor_config.json": VIDEO if video is None else video,
    }.items():
        (folder / name).write_text(json.dumps(value))
    return folder
