"""The JSON files of a model folder that concern text: tokenizer_config, special_tokens_map, added_tokens, generation_config."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ep_runtime.frontend.text.errors import TokenizerError

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedTokenSpec:
    """An added token: its text, and the flags that decide how it is cut out of a prompt."""

    content: str
    special: bool = True
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """What the folder says beside tokenizer.json.

    `named` maps bos_token, eos_token, ... and model-specific `*_token` entries to their text, in the file's order. `extra` are
    further special tokens. `added` maps ids to added tokens that tokenizer.json may lack. `eos_ids` comes from
    generation_config.json, or from config.json where there is none.
    """

    config: dict[str, Any]
    named: dict[str, AddedTokenSpec]
    extra: tuple[AddedTokenSpec, ...] = ()
    added: dict[int, AddedTokenSpec] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()


def is_template_text(given: str) -> bool:
    """Whether what replaces a chat template is its text, and not the path of a file."""
    return "{" in given or "\n" in given


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, None where there is no such file. Raises TokenizerError naming the file when it is unreadable."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Collects the folder's tokenizer settings, with the precedence that transformers gives the files."""
    config = read_json(folder / "tokenizer_config.json") or {}
    merged = dict(config)
    added: dict[int, AddedTokenSpec] = {}
    if "added_tokens_decoder" in config:
        # A config with its own table supersedes the two older files.
        added = {int(index): _token(value, special=False) for index, value in config["added_tokens_decoder"].items()}
    else:
        merged.update(read_json(folder / "special_tokens_map.json") or {})
        for text, index in (read_json(folder / "added_tokens.json") or {}).items():
            added[int(index)] = AddedTokenSpec(content=text, special=False, normalized=True)
    named = {key: _token(value) for key, value in merged.items() if key.endswith("_token") and _is_token(value)}
    extra = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named.update({key: _token(value) for key, value in extra.items() if _is_token(value)})
        extra = []
    return TokenizerFiles(
        config=config,
        named=named,
        extra=tuple(_token(value) for value in extra if _is_token(value)),
        added=added,
        eos_ids=_eos_ids(folder),
    )


def _eos_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name)
        if found is None:
            continue
        text = found.get("text_config")
        value = found.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
        ids = value if isinstance(value, list) else [value]
        return tuple(index for index in ids if isinstance(index, int))
    return ()


def _is_token(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _token(value: str | dict[str, Any], special: bool = True) -> AddedTokenSpec:
    if isinstance(value, str):
        return AddedTokenSpec(content=value, special=special)
    # A token object that leaves `normalized` out is normalised exactly when it is not special.
    is_special = special or bool(value.get("special", False))
    return AddedTokenSpec(
        content=value["content"],
        special=is_special,
        normalized=bool(value.get("normalized", not is_special)),
        lstrip=bool(value.get("lstrip", False)),
        rstrip=bool(value.get("rstrip", False)),
        single_word=bool(value.get("single_word", False)),
    )
