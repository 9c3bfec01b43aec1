"""The vision demo's words: its questions and answers, a tokenizer that knows little else, and a chat template of Qwen's form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, pre_tokenizers

from ep_runtime.demo.tokenizer import learn_tokenizer, write_tokenizer
from ep_runtime.demo.vision_pictures import COLOURS, SHAPES, Subject

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIALS = (PAD, START, END, VISION_START, VISION_END, IMAGE, VIDEO)
MAX_LENGTH = 1024

ONE = "What is in the picture?"
TWO = "What is in the pictures?"
TALK = {
    "Who are you?": "I look at pictures.",
    "Which colours do you know?": ", ".join(COLOURS),
    "Which shapes do you know?": ", ".join(SHAPES),
}
"""Questions without a picture, and their answers."""

TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Qwen3-VL's form of text, images and videos; there are no tools."""


def answer_of(shown: Sequence[Subject]) -> str:
    """What the model is to say of one picture, or of two."""
    if len(shown) == 1:
        return str(shown[0])
    first, second = shown
    return f"first: {first}, second: {second}"


def question_of(pictures: int) -> str:
    """The question about that many pictures."""
    return {1: ONE, 2: TWO}[pictures]


def render(question: str, pictures: int = 0) -> str:
    """The prompt of one question behind that many pictures, as the chat template writes it; one placeholder for each picture."""
    parts: list[dict[str, Any]] = [{"type": "image"}] * pictures + [{"type": "text", "text": question}]
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)
    return template.render(messages=[{"role": "user", "content": parts}], add_generation_prompt=True)


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE in which each word of the questions and answers is one token, and any other text is bytes."""
    words = [answer_of([Subject(colour, shape)] * 2) for colour in COLOURS for shape in SHAPES]
    texts = [ONE, TWO, *TALK, *TALK.values(), *words, "a user", "assistant\n"]
    return learn_tokenizer(texts, SPECIALS, pre_tokenizers.ByteLevel(add_prefix_space=False))


def write_text(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer's two files into `folder`."""
    write_tokenizer(folder, tokenizer, template=TEMPLATE, bos=PAD, eos=END, pad=PAD, max_length=MAX_LENGTH)
