"""The vision demo's model folder: trained on first use, by a process of its own, and kept beside the text demo's.

No weights are fetched: a tiny model in the real format learns, in a minute, to name coloured shapes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ep_runtime.demo.checkpoint import DemoUnavailable
from ep_runtime.demo.training import train_apart, trained_once

BUILDER_VERSION = 1
"""Part of the cache key: raised when the training or the written files change."""


def vision_checkpoint(root: Path | None = None) -> Path:
    """Folder of the vision demo's model, trained on first use; it appears whole or not at all. Raises `DemoUnavailable`."""
    if importlib.util.find_spec("transformers") is None:
        raise DemoUnavailable(
            "the vision demo trains its model with transformers, which is missing: pip install 'ep-runtime[demo-vision]'"
        )
    return trained_once("vision", BUILDER_VERSION, _train, root)


def _train(folder: Path) -> None:
    train_apart("vision", folder)
