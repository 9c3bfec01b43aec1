"""The search path of Python processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_path(*first: str | Path) -> str:
    """A PYTHONPATH of the folders `first`, the repository, and whatever this process was given: packages may lie there."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, first), str(ROOT), *([inherited] if inherited else [])])
