"""Where a model's files are on this host: a folder, the built-in demo, or the hub's cache."""

from __future__ import annotations

import re
from pathlib import Path

from ep_runtime.config import DEMO
from ep_runtime.demo.checkpoint import DemoUnavailable, demo_checkpoint

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt")
"""What is fetched: not the pickled copies of the same weights."""


class ModelNotFound(Exception):
    """`model` names nothing that can be had here."""


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
