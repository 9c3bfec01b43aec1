"""A model folder with text files alone: a small byte-level tokenizer and a ChatML template that knows tools and thinking."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CORPUS = (
    "The quick brown fox jumps over the lazy dog.",
    "Paris is the capital of France. It is also its largest city.",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
    "<tool_call>\n</tool_call>\n<think>\n</think>\n",
    "user system assistant tool one two three four five six seven",
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

TEMPLATE = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools> Answer with <tool_call> when you need one.<|im_end|>
{% endif -%}
{%- for message in messages %}
{%- if message.name == "mallory" %}{{ raise_exception("no word from mallory") }}{% endif %}
{{- "<|im_start|>" + message.role + "\\n" + message.content }}
{%- for call in message.tool_calls or [] %}{% set f = call.function %}
{{- "<tool_call>" + f.name + " " + (f.arguments | tojson) + "</tool_call>" }}{% endfor %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if thinking %}<think>
{% endif %}{% endif %}"""


def write_text_model(folder: Path) -> Path:
    """Fill `folder`; returns it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    return folder
