"""The demos' tokenizers: the text demo's from the vocabulary of its GGUF file, the others' from the words that they use."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL_TOKEN = 3
"""GGUF token type of special tokens (`gguf.TokenType.CONTROL`)."""


def build_tokenizer(tokens: list[str], merges: list[str], token_types: list[int]) -> Tokenizer:
    """Byte-level BPE as SmolLM2 defines it: GPT-2's pattern after every digit has been split off, no prefix space, no BOS.

    `merges` are "left right" pairs in rank order. Tokens of type CONTROL are special: matched whole, dropped when decoding.
    """
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, token_types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def learn_tokenizer(texts: Iterable[str], specials: Iterable[str], split: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """Byte-level BPE in which each piece that `split` makes of `texts` is one token, and any other text is bytes.

    `split` ends in a `ByteLevel`. `specials` are the first ids, in order.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_ids(tokenizer: Tokenizer, **tokens: str) -> dict[str, int]:
    """The ids of tokens, under the names that they are given."""
    vocabulary = tokenizer.get_vocab()
    return {name: vocabulary[token] for name, token in tokens.items()}


def write_tokenizer(folder: Path, tokenizer: Tokenizer, *, template: str, bos: str, eos: str, pad: str, max_length: int) -> None:
    """Write `tokenizer.json` and a `tokenizer_config.json` that carries the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
