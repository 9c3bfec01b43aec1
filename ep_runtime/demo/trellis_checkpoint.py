"""The Trellis demo's model folder: trained on first use, by a process of its own, and kept beside the text demo's."""

from __future__ import annotations

from pathlib import Path

from ep_runtime.demo.training import train_apart, trained_once

BUILDER_VERSION = 1
"""Part of the cache key: raised when the training or the written files change."""


def trellis_checkpoint(root: Path | None = None) -> Path:
    """Folder of the Trellis demo's model, trained on first use; it appears whole or not at all. Raises `DemoUnavailable`."""
    return trained_once("trellis", BUILDER_VERSION, _train, root)


def _train(folder: Path) -> None:
    train_apart("trellis", folder)
