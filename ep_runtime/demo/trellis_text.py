"""The Trellis demo's texts: digits and their complements to nine, a tokenizer of single characters, a chat template."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, Tokenizer, pre_tokenizers

from ep_runtime.demo.tokenizer import learn_tokenizer, token_ids, write_tokenizer

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIALS = (PAD, USER, ASSISTANT, END)
MAX_LENGTH = 256

DIGITS = 5
"""Of a question. The model has seen no other number of them."""

TEMPLATE = (
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Question:
    """`DIGITS` digits to be taken from nine, and the answer."""

    digits: tuple[int, ...]

    def __str__(self) -> str:
        return "".join(map(str, self.digits))

    @property
    def answer(self) -> str:
        """Nine less each digit: `47921` gives `52078`."""
        return "".join(str(9 - digit) for digit in self.digits)


def draw_question(chance: random.Random) -> Question:
    """A question with random digits."""
    return Question(tuple(chance.choices(range(10), k=DIGITS)))


def render(question: Question) -> str:
    """The prompt of one question, as the chat template writes it."""
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)
    return template.render(messages=[{"role": "user", "content": str(question)}], add_generation_prompt=True)


def build_tokenizer() -> Tokenizer:
    """A token for each ASCII character; characters beyond ASCII are bytes."""
    pieces = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    split = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return learn_tokenizer(["0123456789"], SPECIALS, split)


def write_text(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer's two files and generation_config.json into `folder`."""
    write_tokenizer(folder, tokenizer, template=TEMPLATE, bos=PAD, eos=END, pad=PAD, max_length=MAX_LENGTH)
    ids = token_ids(tokenizer, bos_token_id=PAD, eos_token_id=END, pad_token_id=PAD)
    text = json.dumps({"do_sample": False} | ids, indent=2) + "\n"
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
