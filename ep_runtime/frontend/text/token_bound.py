"""The fewest tokens that a text can have, known from its size alone: long before a tokenizer is done with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from ep_runtime.frontend.text.decoding import BYTE_OF_CHAR

UNICODE_SHRINK = 4
"""Canonical composition and decomposition shorten UTF-8 at most 3.5 times (U+1FBE U+0308 U+0301 to U+0390, in Unicode 14)."""

_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation", "UnicodeScripts"})


@dataclass(frozen=True, slots=True)
class TokenBound:
    """No token stands for more than `longest` bytes of normalized text, and normalizing shortens a text at most `shrink` times.

    `plain_ascii`: it leaves ASCII as it is.
    """

    longest: int
    shrink: int
    plain_ascii: bool

    def least(self, text: str) -> int:
        """A number of tokens that `text` has or exceeds."""
        shrink = 1 if self.plain_ascii and text.isascii() else self.shrink
        return -(-utf8_size(text) // (self.longest * shrink))


def utf8_size(text: str) -> int:
    """Bytes of `text` in UTF-8; a lone surrogate counts one."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def token_bound(settings: Mapping[str, Any], backend: tokenizers.Tokenizer) -> TokenBound | None:
    """The bound of a tokenizer with these `settings` (tokenizer.json's form); None where a token may swallow text of any length.

    That is so where text is removed, where a run of unknown characters is one token, where an added token takes the white space
    around it, and where a step is of a kind that is not known to keep its text.
    """
    added = backend.get_added_tokens_decoder().values()
    steps = list(_leaves(settings.get("pre_tokenizer"), "pretokenizers"))
    shrink = _shrink(list(_leaves(settings.get("normalizer"), "normalizers")))
    byte_level = any(step["type"] == "ByteLevel" for step in steps)
    kept = all(step["type"] in _KEEPING and step.get("behavior") != "Removed" for step in steps)
    if shrink is None or not kept or any(token.lstrip or token.rstrip for token in added):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not _knows_every_byte(settings["model"], vocabulary, byte_level):
        return None
    sizes = [len(text) if byte_level else utf8_size(text) for text in vocabulary]
    for token in added:
        sizes.append(utf8_size(token.content))
        if token.normalized and backend.normalizer is not None:
            sizes.append(utf8_size(backend.normalizer.normalize_str(token.content)))
    return TokenBound(max(sizes), *shrink)


def _leaves(step: Mapping[str, Any] | None, inner: str) -> Iterable[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for part in step[inner]:
        yield from _leaves(part, inner)


def _shrink(steps: list[Mapping[str, Any]]) -> tuple[int, bool] | None:
    """How many times shorter these normalizers make a text at most, and whether they keep ASCII; None where nothing is known."""
    shrink = 1
    for step in steps:
        match step:
            case {"type": "NFC" | "NFD"}:
                shrink *= UNICODE_SHRINK
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if utf8_size(new) >= utf8_size(old):
                pass
            case _:
                return None
    # What is replaced or prepended may be of a kind that a later step shortens.
    return shrink, all(step["type"] in ("NFC", "NFD") for step in steps)


def _knows_every_byte(model: Mapping[str, Any], vocabulary: Mapping[str, int], byte_level: bool) -> bool:
    """True when no character is unknown to the model: unknown ones vanish, or a whole run of them becomes one token."""
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if byte_level:
        return model["type"] == "BPE" and all(char in vocabulary for char in BYTE_OF_CHAR)
    fallback = model["type"] in ("BPE", "Unigram") and model.get("byte_fallback") is True
    return fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
