"""Checkpoints that the distributed tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`checkpoint(family, variant)`: the folder of a tiny checkpoint, written once."""
    root = tmp_path_factory.mktemp("checkpoints")
    return lambda family, variant: make_checkpoint(family, variant, root / f"{family}-{variant}")
