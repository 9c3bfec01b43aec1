"""Where a model's files are on this host: a folder, the built-in demo, or the hub's cache.

As a process (`python -m ep_runtime.supervise.source REFERENCE FD`) it writes a `Found` as JSON to the descriptor.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import msgspec

from ep_runtime.config import DEMO
from ep_runtime.demo.checkpoint import DemoUnavailable, demo_checkpoint

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt")
"""What is fetched: not the pickled copies of the same weights."""


class ModelNotFound(Exception):
    """`model` names nothing that can be had here."""


class Found(msgspec.Struct, frozen=True):
    """The answer of a search: the folder, or why there is none."""

    folder: str = ""
    error: str = ""


def at_hand(reference: str) -> bool:
    """Whether `model_folder` answers at once: nothing is to be built or fetched."""
    return reference != DEMO and (Path(reference).expanduser().is_dir() or HUB_NAME.fullmatch(reference) is None)


def model_folder(reference: str) -> Path:
    """The folder that `reference` names, made or fetched if need be; raises `ModelNotFound`."""
    if reference == DEMO:
        try:
            return demo_checkpoint()
        except DemoUnavailable as error:
            raise ModelNotFound(str(error)) from error
    folder = Path(reference).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"model: the folder {folder} has no config.json")
        return folder.resolve()
    if not HUB_NAME.fullmatch(reference):
        raise ModelNotFound(f"model: there is no folder {reference}, and it is not of the form ORG/NAME")
    return _fetch(reference)


def _fetch(name: str) -> Path:
    import huggingface_hub
    import huggingface_hub.errors

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(PATTERNS)))
    except (huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"model: {name} is no folder here and could not be fetched from the hub "
            f"({type(error).__name__}: {error}); on a host without a network give a folder"
        ) from error


def main() -> int:
    """Search, and answer on the descriptor."""
    reference, descriptor = sys.argv[1], int(sys.argv[2])
    try:
        found = Found(folder=str(model_folder(reference)))
    except ModelNotFound as error:
        found = Found(error=str(error))
    with os.fdopen(descriptor, "wb") as pipe:
        pipe.write(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
