"""Text of a growing token sequence, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from ep_runtime.frontend.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Emits the text of tokens as they come; the sum of all emissions equals `tokenizer.decode` of all tokens.

    Never half a character: bytes wait until their character is whole, and what can be no character becomes U+FFFD as in `decode`.
    Tokens of the byte-fallback kind (`<0xE2>`) wait until their run ends, since only then is it known whether the run is text.
    Work per token does not grow with the sequence.

    `prompt_tail_ids` are the last tokens of the prompt: they are not emitted, but they decide whether a first leading space belongs
    to the text, and a character begun in the prompt is emitted whole when its last byte comes. `keep_special` lists special tokens
    that are emitted even when special tokens are skipped (markers that a later parser needs).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        keep_special: Iterable[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        kept = {tokenizer.token_id(text) for text in keep_special}
        self._skipped = frozenset(i for i in tokenizer.special_ids if i not in kept) if skip_special_tokens else frozenset()
        self._assembler = _ByteLevel(tokenizer) if tokenizer.rules.byte_level else _Pieces(tokenizer)
        self._feed(prompt_tail_ids)
        self._assembler.forget_prompt()

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that these tokens complete."""
        return self._feed(token_ids)

    def finish(self) -> str:
        """What still waits: U+FFFD for a character that never became whole, as `decode` gives."""
        return self._assembler.finish()

    def _feed(self, token_ids: Iterable[int]) -> str:
        return "".join([self._assembler.push(index) for index in token_ids if index not in self._skipped])


class _ByteLevel:
    """One UTF-8 stream over all tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def forget_prompt(self) -> None:
        """Bytes of a character begun in the prompt stay in the decoder; they are part of a character that is still to come."""

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Pieces:
    """Text pieces, with runs of byte tokens between them; the start of the whole text may lose a space."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules = tokenizer.rules
        self._run = bytearray()
        self._first = True
        self._to_strip = tokenizer.rules.strip_start

    def push(self, token_id: int) -> str:
        text = self._tokenizer.token_text(token_id)
        if not text:
            return ""
        if self._first and self._rules.drop_first:
            text = text.replace(self._rules.drop_first, "")
        self._first = False
        for old, new in self._rules.replace:
            text = text.replace(old, new)
        if (byte := self._rules.fallback_byte(text)) is not None:
            self._run.append(byte)
            return ""
        return self._strip(self._end_run() + text)

    def forget_prompt(self) -> None:
        """Keeps of an open run only the bytes of a character that is still incomplete."""
        if self._run:
            whole = codecs.getincrementaldecoder("utf-8")("replace")
            self._strip(whole.decode(bytes(self._run)))
            self._run = bytearray(whole.getstate()[0])

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip(self, text: str) -> str:
        """Takes off the leading spaces that the decoder removes from the start of the whole text."""
        while self._to_strip and text:
            if not text.startswith(" "):
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text
