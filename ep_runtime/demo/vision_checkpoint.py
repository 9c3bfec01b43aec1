"""The vision demo's model folder: trained on first use, by a process of its own, and kept beside the text demo's.

No weights are fetched: a tiny model in the real format learns, in a minute, to name coloured shapes.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from ep_runtime.demo.checkpoint import DemoUnavailable, built_once, cache_root

BUILDER_VERSION = 1
"""Part of the cache key: raised when the training or the written files change."""


def vision_checkpoint(root: Path | None = None) -> Path:
    """Folder of the vision demo's model, trained on first use; it appears whole or not at all. Raises `DemoUnavailable`."""
    if importlib.util.find_spec("transformers") is None:
        raise DemoUnavailable(
            "the vision demo trains its model with transformers, which is missing: pip install 'ep-runtime[demo-vision]'"
        )
    return built_once((root or cache_root()) / f"demo-vision-{BUILDER_VERSION}", _train)


def _train(folder: Path) -> None:
    command = [sys.executable, "-P", "-m", "ep_runtime.demo.vision_training", str(folder)]
    status = subprocess.run(command, stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
    if status != 0:
        raise DemoUnavailable(f"training the vision demo's model ended with status {status}")
