"""The text of a DIGEST ack: one short checksum a section of a rank's state, so that ranks that differ know in what.

`slots=0badf00d lengths=...`: names without spaces, values of 8 hexadecimal digits, the low half of each section's u64. The ack's
own digest covers every section whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def pack_sections(sections: Mapping[str, int]) -> str:
    """The text, in the order of the mapping."""
    return " ".join(f"{name}={value & 0xFFFFFFFF:08x}" for name, value in sections.items())


def unpack_sections(text: str) -> dict[str, str]:
    """Values by name; what is no section, as in a text that was cut, is left out."""
    pairs = (part.partition("=") for part in text.split())
    return {name: value for name, mark, value in pairs if mark and len(value) == 8}


def differing(texts: Sequence[str]) -> dict[str, list[str]]:
    """The sections on which the texts do not all agree, each with every text's value (empty where a text lacks it), in order."""
    unpacked = [unpack_sections(text) for text in texts]
    names = dict.fromkeys(name for sections in unpacked for name in sections)
    found = {name: [sections.get(name, "") for sections in unpacked] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}
