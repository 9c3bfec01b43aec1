"""Log-probabilities in the three shapes that clients know: chat, completions, and vLLM's prompt_logprobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from ep_runtime.frontend.text.tokenizer import Tokenizer
from protocol.messages import TokenLogprobs

FLOOR = -9999.0


def finite(value: float) -> float:
    """JSON has no -inf; OpenAI gives -9999 for what cannot occur."""
    return max(value, FLOOR)


CACHED_TOKENS = 32_768
"""Tokens whose text is kept ready: more than the alternatives of most texts name."""


class TokenTexts:
    """Texts of single tokens, as answers show them; made once for the process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.string = lru_cache(CACHED_TOKENS)(self._string)
        self.chat = lru_cache(CACHED_TOKENS)(self._chat)

    def _string(self, token: int) -> str:
        """A token's text; one that is no whole UTF-8 reads `bytes:\\xe2\\x80`, so that different tokens stay different keys."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _chat(self, token: int) -> tuple[msgspec.Raw, msgspec.Raw]:
        """A token's text and its bytes, encoded as JSON."""
        data = self._tokenizer.token_bytes(token)
        text = msgspec.json.encode(data.decode("utf-8", "replace"))
        return msgspec.Raw(text), msgspec.Raw(msgspec.json.encode(list(data)))


def chat_entry(texts: TokenTexts, token: int, entry: TokenLogprobs, top: int) -> dict[str, Any]:
    """One element of `logprobs.content`."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text, data = texts.chat(token)
        return {"token": text, "logprob": finite(logprob), "bytes": data}

    alternatives = zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)
    return {**one(token, entry.logprob), "top_logprobs": [one(other, value) for other, value in alternatives]}


def prompt_entries(texts: TokenTexts, ids: list[int], entries: dict[int, TokenLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per position null or {token id: {logprob, rank, decoded_token}}, the prompt's own token first."""
    found: list[dict[str, Any] | None] = []
    for position, token in enumerate(ids):
        entry = entries.get(position)
        if entry is None:
            found.append(None)
            continue
        row = {str(token): {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": texts.string(token)}}
        for rank, (other, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
            row.setdefault(str(other), {"logprob": finite(value), "rank": rank, "decoded_token": texts.string(other)})
        found.append(row)
    return found


@dataclass(slots=True)
class CompletionLogprobs:
    """The four parallel lists of /v1/completions. `offset` is where the next token's text begins."""

    texts: TokenTexts
    top: int
    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token: int, entry: TokenLogprobs | None) -> None:
        """Append one token; None is the first of a prompt, of which nothing is known."""
        text = self.texts.string(token)
        self.tokens.append(text)
        self.text_offset.append(self.offset)
        self.offset += len(text)
        if entry is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(finite(entry.logprob))
        top = zip(entry.top_ids[: self.top], entry.top_logprobs[: self.top], strict=True)
        row = {self.texts.string(other): finite(value) for other, value in top}
        row.setdefault(text, finite(entry.logprob))
        self.top_logprobs.append(row)

    def take(self) -> dict[str, Any]:
        """What was added since the last take."""
        taken = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return taken
