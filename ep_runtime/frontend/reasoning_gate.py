"""A grammar that begins where the reasoning ends: a model whose prompt opens `<think>` thinks freely first."""

from __future__ import annotations

from typing import Protocol

from ep_runtime.frontend.text.detokenizer import IncrementalDetokenizer
from ep_runtime.frontend.text.reasoning import ReasoningSplitter
from ep_runtime.frontend.text.tokenizer import Tokenizer


class MaskSource(Protocol):
    """What constrains a sequence: a grammar, or one that waits for the reasoning to end."""

    def mask(self) -> bytes:
        """Bitmask of the tokens allowed next: little-endian uint32 words, one bit a token."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False when it is not allowed."""


def free_mask(vocab_size: int, barred: tuple[int, ...]) -> bytes:
    """Bitmask that allows every token of the vocabulary but `barred`."""
    bits = (1 << vocab_size) - 1
    for token in barred:
        bits &= ~(1 << token)
    return bits.to_bytes(4 * ((vocab_size + 31) // 32), "little")


class AfterReasoning:
    """Inside the reasoning anything but an end token is allowed; then what `grammar` allows."""

    def __init__(
        self, grammar: MaskSource, splitter: ReasoningSplitter, detokenizer: IncrementalDetokenizer, tokenizer: Tokenizer
    ) -> None:
        self._grammar = grammar
        self._splitter = splitter
        self._detokenizer = detokenizer
        self._free = free_mask(tokenizer.vocab_size, tokenizer.eos_token_ids)

    def mask(self) -> bytes:
        """The mask of the next token."""
        return self._free if self._splitter.in_reasoning else self._grammar.mask()

    def accept(self, token_id: int) -> bool:
        """Advance by one token."""
        if not self._splitter.in_reasoning:
            return self._grammar.accept(token_id)
        self._splitter.push(self._detokenizer.push([token_id]))
        return True
