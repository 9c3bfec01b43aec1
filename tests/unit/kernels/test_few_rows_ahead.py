"""What the compiler makes of the linear layers of few rows: weights come before the wait for the kernel in front, x comes after."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.support.python_path import python_path

SHARED_MEMORY = 227 * 1024
"""Bytes that a program may have on an H200."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `few_rows_ahead` prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-W", "ignore", "-m", "tests.unit.kernels.few_rows_ahead"]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def ptx(compiled: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """By way, the code before the wait and after it."""
    found = {}
    for name, text in compiled["ptx"].items():
        before, after = re.split(r"griddepcontrol\.wait\s*;", text)
        found[name] = before, after
    return found


def test_weights_are_asked_for_before_the_wait(ptx: dict[str, tuple[str, str]]) -> None:
    loads = {name: before.count("ld.global.v4") for name, (before, _) in ptx.items()}
    # 16 bytes by 128 threads a load: 4 x 2048, 16 x 2048 and 64 x 256 weights of two bytes.
    assert loads == {"rows": 8, "held": 32, "shared": 16, "router": 16, "streamed": 0, "row tiles": 0}
    assert all("prefetch.global.L2" in ptx[name][0] for name in ("streamed", "row tiles"))


def test_nothing_is_written_and_x_is_not_read_before_the_wait(ptx: dict[str, tuple[str, str]]) -> None:
    for name, (before, after) in ptx.items():
        assert [word for word in ("st.global", "atom.global", "cp.async.cg") if word in before] == [], name
        assert any(word in after for word in ("ld.global", "cp.async.cg")), name
        assert "st.global" in after, name


def test_dependents_start_after_the_wait(ptx: dict[str, tuple[str, str]]) -> None:
    for name, (before, after) in ptx.items():
        assert "griddepcontrol.launch_dependents" not in before, name
        assert after.count("griddepcontrol.launch_dependents") == 1, name


def test_tiles_of_64_use_the_wide_instruction(ptx: dict[str, tuple[str, str]]) -> None:
    assert ["wgmma" in after for _, after in (ptx["shared"], ptx["row tiles"], ptx["router"], ptx["held"])] == [True] * 3 + [False]


def test_what_the_router_multiplies_fits_shared_memory(compiled: dict[str, Any]) -> None:
    memory = compiled["router memory"]
    assert sorted(memory) == ["32 x 2", "32 x 4", "33 x 2", "33 x 4"]
    assert max(memory.values()) <= SHARED_MEMORY
