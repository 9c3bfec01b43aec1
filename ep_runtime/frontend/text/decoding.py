"""How token texts become bytes, read from the `decoder` entry of tokenizer.json.

Two kinds exist among the models served. *Byte-level*: every character of a token's text stands for one byte (the printable
table of GPT-2), and the bytes of all tokens together are UTF-8. *Pieces* (sentencepiece): text with `▁` for the space, and tokens
`<0xE2>` that stand for single bytes; a run of such byte tokens is text only if the whole run is UTF-8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ep_runtime.frontend.text.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRules:
    """The decoder of a tokenizer as plain values.

    `replace` holds (from, to) pairs applied to each piece in order. `strip_start` is how many leading spaces the whole text loses.
    `drop_first` is a character that vanishes from the first piece (Metaspace's prepended space). All are unused when `byte_level`.
    """

    byte_level: bool
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    strip_start: int = 0
    drop_first: str = ""

    def piece_bytes(self, text: str) -> bytes:
        """Raw bytes of one token's text, without the rules that concern the first token alone."""
        if self.byte_level:
            mapped = [BYTE_OF_CHAR.get(char) for char in text]
            # A token with a character outside of the table is an added token in plain text.
            return text.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        for old, new in self.replace:
            text = text.replace(old, new)
        byte = self.fallback_byte(text)
        return text.encode() if byte is None else bytes((byte,))

    def fallback_byte(self, text: str) -> int | None:
        """The byte that a token such as `<0xE2>` stands for, None for any other token."""
        if not self.byte_fallback or (match := _BYTE_TOKEN.fullmatch(text)) is None:
            return None
        return int(match[1], 16)


def byte_table() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the other bytes for U+0100 upwards in ascending order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + index): byte for index, byte in enumerate(rest)})
    return table


BYTE_OF_CHAR = byte_table()


def decode_rules(decoder: dict[str, Any] | None, where: str) -> DecodeRules:
    """Rules for the `decoder` entry of a tokenizer.json. Raises TokenizerError for a decoder of another kind, naming it."""
    steps = _flatten(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodeRules(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        prepends = steps[0].get("prepend_scheme", "always") != "never" and steps[0].get("add_prefix_space", True)
        return DecodeRules(byte_level=False, replace=((mark, " "),), drop_first=mark if prepends else "")
    replace, strip, order = [], 0, []
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replace.append((old, new))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                strip = start
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise TokenizerError(f"{where}: unsupported decoder step {step.get('type')}")
        order.append(step["type"])
    ranks = [("Replace", "ByteFallback", "Fuse", "Strip").index(kind) for kind in order]
    if not order or ranks != sorted(ranks) or ("Strip" in order and "Fuse" not in order):
        raise TokenizerError(f"{where}: unsupported decoder {'+'.join(order) or 'none'}")
    return DecodeRules(byte_level=False, byte_fallback="ByteFallback" in order, replace=tuple(replace), strip_start=strip)


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [leaf for step in decoder["decoders"] for leaf in _flatten(step)]
