"""The short way of a launch takes the kernel, grid and arguments that Triton's own takes, in a process without its interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from kernels.launch import cdiv, next_power_of_2
from tests.support.python_path import python_path


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "PYTHONPATH": python_path()}
    command = [sys.executable, "-P", "-W", "ignore", "-m", "tests.unit.kernels.launch_ahead"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cases(printed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return printed["launches"]


def test_constants_go_by_name_alone(printed: dict[str, Any]) -> None:
    assert printed["refusals"] == [True] * 3


def test_launches_agree_with_tritons(cases: dict[str, dict[str, Any]]) -> None:
    assert len(cases) == 14
    assert [name for name, case in cases.items() if not case["same"]] == []


def test_the_second_launch_of_a_kind_takes_the_short_way(cases: dict[str, dict[str, Any]]) -> None:
    assert [name for name, case in cases.items() if not case["short"]] == []


def test_every_kind_has_a_kernel_of_its_own(cases: dict[str, dict[str, Any]]) -> None:
    alike = {"plain", "other numbers", "parameter"}
    assert len({cases[name]["kernel"] for name in alike}) == 1
    assert len({case["kernel"] for case in cases.values()}) == len(cases) - len(alike) + 1


@pytest.mark.parametrize("value", [0, 1, 2, 3, 4, 5, 64, 65, 1000])
def test_host_arithmetic(value: int) -> None:
    power = next_power_of_2(value)
    assert power in [1 << bits for bits in range(11)]
    assert power >= value
    assert power == 1 or power // 2 < value
    assert cdiv(value, 7) == (value + 6) // 7
