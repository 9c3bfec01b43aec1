"""A bound launch takes the kernel, grid and arguments that Triton's own takes, in a process without its interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from kernels.launch import bind, cdiv, fault_of, next_power_of_2
from tests.support.python_path import python_path

ALIKE = {"plain", "other numbers", "parameter", "wider stride", "a number of one that is not compiled for"}


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


def test_the_installed_triton_is_as_told(printed: dict[str, Any]) -> None:
    assert printed["fault"] is None


def test_arguments_in_another_order_are_refused(printed: dict[str, Any]) -> None:
    assert [name for name, refused in printed["refusals"].items() if not refused] == []


def test_launches_agree_with_tritons(cases: dict[str, dict[str, Any]]) -> None:
    assert len(cases) == 20
    assert [name for name, case in cases.items() if not case["same"]] == []


def test_the_second_launch_of_a_kind_takes_the_short_way(cases: dict[str, dict[str, Any]]) -> None:
    assert [name for name, case in cases.items() if not case["short"]] == []


def test_with_a_fault_every_launch_is_tritons(printed: dict[str, Any]) -> None:
    assert printed["with a fault"]["same"]
    assert not printed["with a fault"]["short"]


def test_every_kind_has_a_kernel_of_its_own(cases: dict[str, dict[str, Any]]) -> None:
    assert len({cases[name]["kernel"] for name in ALIKE}) == 1
    assert cases["descriptor"]["kernel"] == cases["descriptor of another"]["kernel"]
    assert len({case["kernel"] for case in cases.values()}) == len(cases) - len(ALIKE)


def test_what_is_no_jit_function_is_launched_as_it_is() -> None:
    seen: list[Any] = []

    class Interpreted:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *args, **constants: seen.append((grid, args, constants))

    bind(Interpreted(), SIZE=4, num_warps=2)((3, 2, 1), "x", 5)
    assert seen == [((3, 2, 1), ("x", 5), {"SIZE": 4, "num_warps": 2})]


class Compiled:
    def __init__(self) -> None:
        self.function = self.packed_metadata = None

    def run(self) -> None: ...


class Launcher:
    def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: object) -> None: ...


class Unlike:
    def __call__(self, function: int, *args: object) -> None: ...


def test_what_a_triton_lacks_is_named() -> None:
    assert fault_of(Compiled, Launcher) is None
    assert "no packed_metadata" in str(
        fault_of(type("Other", (), {"__init__": Unlike.__call__, "run": 0, "function": 0}), Launcher)
    )
    assert "stream" in str(fault_of(Compiled, Unlike))


@pytest.mark.parametrize("value", [0, 1, 2, 3, 4, 5, 64, 65, 1000])
def test_host_arithmetic(value: int) -> None:
    power = next_power_of_2(value)
    assert power in [1 << bits for bits in range(11)]
    assert power >= value
    assert power == 1 or power // 2 < value
    assert cdiv(value, 7) == (value + 6) // 7
