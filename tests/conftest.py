"""Fixtures of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter, which must be chosen before the first import of triton.
    os.environ["TRITON_INTERPRET"] = "1"

from tests.support.ranks import RankPool


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): tests of a group run on one worker (pytest-xdist, --dist loadgroup)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test that uses the rank pool belongs to one xdist group, so that one worker alone spawns ranks; others go by file."""
    for item in items:
        group = "ranks" if "ranks" in getattr(item, "fixturenames", ()) else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of rank processes; they are spawned by the first job that needs them and end with the session."""
    with RankPool() as pool:
        yield pool
