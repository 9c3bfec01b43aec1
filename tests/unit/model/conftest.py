"""Small checkpoints, each written once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.vision_checkpoints import make_vision_checkpoint

Checkpoint = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """(family, variant) -> folder."""
    root = tmp_path_factory.mktemp("checkpoints")
    return lambda family, variant: make_checkpoint(family, variant, root / f"{family}-{variant}")


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of `VARIANTS` -> folder."""
    root = tmp_path_factory.mktemp("vision")
    return lambda name: make_vision_checkpoint(name, root / name)
