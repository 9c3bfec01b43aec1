"""The tokenizer of a model folder, on the `tokenizers` library alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from ep_runtime.frontend.text.decoding import DecodeRules, decode_rules
from ep_runtime.frontend.text.errors import TokenizerError
from ep_runtime.frontend.text.folder import AddedTokenSpec, TokenizerFiles, read_tokenizer_files
from ep_runtime.frontend.text.token_bound import TokenBound, token_bound

__all__ = ["Tokenizer", "TokenizerError"]


class Tokenizer:
    """Text to token ids and back, with the conventions of transformers' fast tokenizers.

    Nothing changes after `load`, so any number of threads may share one. Special tokens written in the text are recognised, as
    transformers does: what may come from an untrusted writer is a matter for the caller.
    """

    def __init__(self, backend: tokenizers.Tokenizer, files: TokenizerFiles, rules: DecodeRules, bound: TokenBound | None) -> None:
        self._backend = backend
        self._bound = bound
        added = backend.get_added_tokens_decoder()
        self._special_text = frozenset(t.content for t in added.values() if t.special)
        self.rules = rules
        self._bytes: dict[int, bytes] = {}  # every generated token asks; at most one entry a token of the vocabulary
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        """One past the highest token id, added tokens included."""
        self.special_ids: frozenset[int] = frozenset(vocabulary[text] for text in self._special_text)
        self.added_ids: frozenset[int] = frozenset(added)
        """Tokens that stand beside the model's vocabulary, special ones among them."""
        self.special_tokens: dict[str, str] = {name: token.content for name, token in files.named.items()}
        """Text of bos_token, eos_token, ... as the folder names them: the variables of a chat template."""
        self.bos_token: str | None = self.special_tokens.get("bos_token")
        self.eos_token: str | None = self.special_tokens.get("eos_token")
        own = [vocabulary[self.eos_token]] if self.eos_token in vocabulary else []
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *files.eos_ids]))
        """The tokenizer's own end token first, then those of generation_config.json (config.json where there is none)."""

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads tokenizer.json and the settings beside it. Raises TokenizerError naming the file that is missing or bad."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: no such file; only folders with a tokenizer.json (fast tokenizer) are supported")
        try:
            text = path.read_text(encoding="utf-8")
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise TokenizerError(f"{path}: not a tokenizer: {error}") from error
        files = read_tokenizer_files(Path(folder))
        backend.no_truncation()
        backend.no_padding()
        _add_missing(backend, files)
        settings = json.loads(text)
        return cls(backend, files, decode_rules(settings.get("decoder"), str(path)), token_bound(settings, backend))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. With `add_special_tokens`, tokenizer.json's post-processor adds its bos or eos token.

        (add_bos_token and add_eos_token of tokenizer_config.json do not count beside a tokenizer.json, as in transformers 5.)
        """
        # The form for batches lets other threads run meanwhile; a long text takes seconds.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, without tokenizing it; 0 for a tokenizer of which nothing is known."""
        return 0 if self._bound is None else self._bound.least(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids outside of the vocabulary give nothing, bytes that are not UTF-8 give U+FFFD."""
        known = [index for index in ids if 0 <= index < self.vocab_size]
        return self._backend.decode_batch([known], skip_special_tokens=skip_special_tokens)[0]

    def token_text(self, token_id: int) -> str:
        """The vocabulary's entry, in its own spelling (`Ġhello`, `▁hello`, `<0xE2>`); empty for an id outside of it."""
        return self._backend.id_to_token(token_id) or "" if 0 <= token_id < self.vocab_size else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of text that a token stands for, possibly a part of a character; empty for an id outside of the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self.rules.piece_bytes(self.token_text(token_id))
            if known:
                self._bytes[token_id] = known
        return known

    def token_id(self, text: str) -> int | None:
        """The id of the vocabulary's entry `text`, None where there is none."""
        return self._backend.token_to_id(text)

    def to_json(self) -> str:
        """The whole tokenizer in tokenizer.json's format, with the tokens that the other files add."""
        return self._backend.to_str()


def _add_missing(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Adds what the other files name and tokenizer.json lacks, in id order; named and extra tokens are special in any case."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = {token.content: token for token in files.added.values()}
    for _, token in sorted(files.added.items()):
        if token.content not in known:
            backend.add_tokens([_added(token)])
    specials = [*files.named.values(), *files.extra]
    # A token that an added-tokens table describes keeps its own flags.
    backend.add_special_tokens([_added(named.get(token.content, token)) for token in specials])


def _added(token: AddedTokenSpec) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )
