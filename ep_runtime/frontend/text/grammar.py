"""Token masks that hold an output to a JSON schema, a pattern or a tool call, on the llguidance library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance

from ep_runtime.frontend.text.errors import GrammarError
from ep_runtime.frontend.text.tokenizer import Tokenizer
from ep_runtime.frontend.text.tool_grammar import calls_in_words_rule, tool_calls_rule

__all__ = ["Grammar", "GrammarError", "GrammarFactory"]

MAX_SCHEMA_BYTES = 128 << 10
MAX_PATTERN_CHARS = 4096
JSON_OPTIONS: dict[str, Any] = {
    # At most one blank, or one line break with its indentation, at a place: a model cannot fill its budget with white space.
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \t]?|\r?\n[ \t]{0,64}",
    # The generators of schemas write oneOf for unions; which of several alternatives holds is not counted.
    "coerce_one_of": True,
}


_LARK = {"\\d": "[0-9]", "\\D": "[^0-9]", "/": "\\/", "\n": "\\n", "\r": "\\r"}
"""What reads otherwise between the slashes of a Lark pattern, or would match the digits of every script."""


class Grammar:
    """The state of one constrained output. Not shared between threads."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        # Accepted end tokens stay out of the matcher: once it has stopped, it takes none.
        self._ended = 0

    def fork(self) -> Grammar:
        """Another output in the same state; what follows on one does not touch the other."""
        other = Grammar(self._matcher.deep_copy(), self._vocab_size, self._eos)
        other._ended = self._ended
        return other

    def mask(self) -> bytes:
        """Allowed next tokens: little-endian uint32 words, bit i % 32 of word i // 32 for token i, (vocab_size + 31) // 32 words.

        An end token is allowed exactly when the output may end. Raises GrammarError when the grammar passes its limits.
        """
        bits = self._matcher.compute_bitmask()
        self._check()
        width = (self._vocab_size + 31) // 32 * 4
        bits = bits[:width].ljust(width, b"\0")
        if spare := width * 8 - self._vocab_size:
            last = int.from_bytes(bits[-4:], "little") & ((1 << (32 - spare)) - 1)
            bits = bits[:-4] + last.to_bytes(4, "little")
        return bits

    def accept(self, token_id: int) -> bool:
        """Takes the token that was sampled; False, with nothing changed, for one that is not allowed here."""
        if token_id in self._eos:
            if not self._matcher.is_accepting():
                return False
            self._ended += 1
            return True
        if self._ended or not 0 <= token_id < self._vocab_size:
            return False
        taken = self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        return taken

    @property
    def finished(self) -> bool:
        """True when nothing but an end token may follow."""
        return bool(self._ended) or self._matcher.is_stopped()

    @property
    def may_end(self) -> bool:
        """True when the output so far is complete."""
        return bool(self._ended) or self._matcher.is_accepting()

    def rollback(self, count: int) -> None:
        """Takes back the last `count` accepted tokens. Raises GrammarError when fewer were accepted."""
        ended = min(count, self._ended)
        if count > ended and not self._matcher.rollback(count - ended):
            raise GrammarError(f"cannot take back {count} tokens: {self._matcher.get_error()}")
        self._ended -= ended

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {self._matcher.get_error()}")


class GrammarFactory:
    """Makes grammars for one tokenizer; any number of threads may share one.

    `vocab_size` is the model's, the width of every mask; it may exceed the tokenizer's, and tokens that the tokenizer does not know
    are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size or tokenizer.vocab_size
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._refusal = ""
        try:
            self._backend = self._load(tokenizer)
        except ValueError as error:
            # A server whose tokenizer the library cannot read serves all requests but those that need a grammar.
            self._refusal = f"this model's tokenizer takes no grammars: {error}"

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """JSON that is valid under `schema`. Raises GrammarError, with the reason, for a bad, unsupported or too large schema."""
        return self._rule(f"%json {self._schema(schema)}")

    def regex(self, pattern: str) -> Grammar:
        """Text that matches `pattern` from start to end (Rust's syntax: no look-around, no back-references); `\\d` is 0 to 9."""
        if len(pattern) > MAX_PATTERN_CHARS:
            raise GrammarError(f"the pattern has {len(pattern)} characters; the limit is {MAX_PATTERN_CHARS}")
        return self._rule(f"/{_lark_pattern(pattern)}/")

    def tool_calls(
        self,
        tools: Sequence[Mapping[str, Any]],
        choice: str | Mapping[str, Any] = "required",
        parser_name: str = "hermes",
        *,
        parallel: bool = True,
    ) -> Grammar:
        """Calls in the syntax of `parser_name`, arguments valid under the tools' schemas.

        `choice` is "required" (one call, or several if `parallel`, of any of the tools) or names the one tool to call once, as a
        string or as OpenAI's object.
        """
        rule = tool_calls_rule(tools, choice, parser_name, self._tokenizer, self._schema, parallel)
        return self._rule(rule)

    def calls_or_json(
        self,
        tools: Sequence[Mapping[str, Any]],
        schema: Mapping[str, Any] | None,
        parser_name: str = "hermes",
        *,
        parallel: bool = True,
    ) -> Grammar:
        """Calls as `tool_calls` has them, or JSON under `schema` (any object without one): never both."""
        calls, _, further = tool_calls_rule(tools, "required", parser_name, self._tokenizer, self._schema, parallel).partition("\n")
        json_text = self._schema({"type": "object"} if schema is None else schema)
        return self._rule(f"({calls}) | json_text\njson_text: %json {json_text}\n{further}")

    def calls_in_words(self, tools: Sequence[Mapping[str, Any]], parser_name: str = "hermes", *, parallel: bool = True) -> Grammar:
        """Any text, with calls of these tools alone in it, as `tool_calls` has them. Without `parallel` it ends with the first."""
        return self._rule(calls_in_words_rule(tools, parser_name, self._tokenizer, self._schema, parallel))

    def _schema(self, schema: Mapping[str, Any] | bool) -> str:
        """The schema as JSON text with our options, checked for its size."""
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        try:
            text = json.dumps({**schema, "x-guidance": JSON_OPTIONS}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the schema is not JSON, or nested too deeply: {error}") from error
        if len(text) > MAX_SCHEMA_BYTES:
            raise GrammarError(f"the schema has {len(text)} bytes; the limit is {MAX_SCHEMA_BYTES}")
        return text

    def _load(self, tokenizer: Tokenizer) -> llguidance.LLTokenizer:
        ends = [index for index in tokenizer.eos_token_ids if index < tokenizer.vocab_size]
        if not ends:
            raise GrammarError("it has no end token, so no grammar could end")
        return llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=max(self._vocab_size, tokenizer.vocab_size), eos_token=ends)

    def _rule(self, rule: str) -> Grammar:
        if self._refusal:
            raise GrammarError(self._refusal)
        matcher = llguidance.LLMatcher(
            self._backend, llguidance.LLMatcher.grammar_from_lark(f"start: {rule}\n"), log_level=0, limits=self._limits
        )
        if matcher.is_error():
            raise GrammarError(matcher.get_error().strip() or "the grammar is not supported")
        return Grammar(matcher, self._vocab_size, self._eos)


def _lark_pattern(pattern: str) -> str:
    """`pattern` as it stands between the slashes of a Lark pattern."""
    return "".join([_LARK.get(piece, piece) for piece in re.findall(r"(?s)\\.|.", pattern)])
