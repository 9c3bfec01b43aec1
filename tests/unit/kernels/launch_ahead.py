"""Bound launches where the driver is a recorder: prints as JSON, for each launch, whether it agrees with Triton's own.

A program of its own, since the suite's processes have chosen Triton's interpreter. Kernels are compiled for sm_90; none runs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import launch as launches
from kernels.launch import FAULT, bind

LAUNCHED: list[tuple[Any, ...]] = []


class Utilities:
    """Of the driver: what a compiled kernel asks before it is first launched."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 0, hash(binary), 32, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 17}


class Recorder:
    """The driver, as far as launches need it. `device` is the current one."""

    utils = Utilities()
    device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 7 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: object, metadata: object) -> Any:
        return lambda *args: LAUNCHED.append(args)


@triton.jit(do_not_specialize=["count"])
def scale_kernel(x, out, count, stride, factor, SIZE: tl.constexpr, TWICE: tl.constexpr):
    """Any kernel."""
    at = tl.arange(0, SIZE)
    value = tl.load(x + at * stride, mask=at < count, other=0.0)
    if out is not None:
        tl.store(out + at, value * factor * (2 if TWICE else 1), mask=at < count)


@triton.jit
def tile_kernel(rows, out, SIZE: tl.constexpr):
    """A kernel with a tensor descriptor."""
    at = tl.arange(0, SIZE)
    tl.store(out + at[:, None] * SIZE + at[None, :], rows.load([0, 0]))


def seen(launch: tuple[Any, ...]) -> list[Any]:
    """Grid, stream, function, settings and arguments of a launch; tensors by address. Hooks and Triton's record are left out."""
    plain = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in launch]
    return [*plain[:6], *(str(each) if isinstance(each, TensorDescriptor) else each for each in plain[9:])]


def agrees(kernel: Any, launch: Any, grid: tuple[int, int, int], *args: Any, **constants: Any) -> dict[str, Any]:
    """Two bound launches, then Triton's: the kernels, what the driver saw, and whether the second took the short way."""
    first = launch(grid, *args)
    own, kernel.run = kernel.run, None
    try:
        second, short = launch(grid, *args), True
    except TypeError:
        second, short = first, False
    kernel.run = own
    third = kernel[grid](*args, **constants)
    launches = LAUNCHED[-3 if short else -2 :]
    same = all(seen(each) == seen(launches[0]) for each in launches)
    return {"kernel": id(first), "same": first is second is third and same, "short": short}


def refused(*args: Any, **constants: Any) -> bool:
    """Whether a launch is refused."""
    try:
        bind(scale_kernel, **constants)((1, 1, 1), *args)
    except TypeError:
        return True
    return False


def scaled() -> dict[str, dict[str, Any]]:
    """Launches of one kernel that differ in one thing from the first."""
    x, y = torch.zeros(256), torch.zeros(256, dtype=torch.bfloat16)
    plain: dict[str, Any] = {"SIZE": 128, "TWICE": False, "num_warps": 4}
    launch = bind(scale_kernel, **plain)
    twice, warps = plain | {"TWICE": True}, plain | {"num_warps": 8, "launch_pdl": True}
    grid = (3, 1, 1)

    def case(*args: Any, grid: tuple[int, int, int] = grid) -> dict[str, Any]:
        return agrees(scale_kernel, launch, grid, *args, **plain)

    cases = {
        "plain": case(x, x, 100, 16, 2.0),
        "other numbers": case(x[4:], x, 7, 16, 0.5, grid=(1, 2, 3)),
        "parameter": case(torch.nn.Parameter(x), x, 100, 16, 2.0),
        "wider stride": case(x, x, 100, 32, 2.0),
        "a number of one that is not compiled for": case(x, x, 1, 16, 2.0),
        "odd stride": case(x, x, 100, 17, 2.0),
        "stride of one": case(x, x, 100, 1, 2.0),
        "long stride": case(x, x, 100, 1 << 40, 2.0),
        "long count": case(x, x, 1 << 40, 16, 2.0),
        "other dtype": case(y, x, 100, 16, 2.0),
        "nothing": case(x, None, 100, 16, 2.0),
        "unaligned": case(x[1:], x, 100, 16, 2.0),
        "the other unaligned": case(x, x[1:], 100, 16, 2.0),
        "other constant": agrees(scale_kernel, bind(scale_kernel, **twice), grid, x, x, 100, 16, 2.0, **twice),
        "other options": agrees(scale_kernel, bind(scale_kernel, **warps), grid, x, x, 100, 16, 2.0, **warps),
    }
    Recorder.device = 1
    cases["other device"] = case(x, x, 100, 16, 2.0)
    Recorder.device = 0
    return cases


def with_a_fault() -> dict[str, Any]:
    """A launch where Triton is not as it should be."""
    x, plain = torch.zeros(256), {"SIZE": 64, "TWICE": False}
    launches.FAULT = "another Triton"
    launch = bind(scale_kernel, **plain)
    launches.FAULT = FAULT
    return agrees(scale_kernel, launch, (3, 1, 1), x, x, 100, 16, 2.0, **plain)


def tiled() -> dict[str, dict[str, Any]]:
    """Launches with descriptors."""
    square, other = torch.zeros(64, 64, dtype=torch.float16), torch.zeros(64, 64, dtype=torch.bfloat16)
    launch = bind(tile_kernel, SIZE=16)

    def case(launch: Any, tensor: torch.Tensor, size: int) -> dict[str, Any]:
        rows = TensorDescriptor.from_tensor(tensor, [size, size])
        return agrees(tile_kernel, launch, (1, 1, 1), rows, square, SIZE=size)

    return {
        "descriptor": case(launch, square, 16),
        "descriptor of another": case(launch, square[:32], 16),
        "descriptor of another dtype": case(launch, other, 16),
        "other tile": case(bind(tile_kernel, SIZE=32), square, 32),
    }


def main() -> None:
    """All cases, by name."""
    driver.set_active(Recorder())  # type: ignore[arg-type]
    x = torch.zeros(256)
    constants = {"SIZE": 128, "TWICE": False}
    refusals = {
        "a constant among the arguments": refused(x, x, 100, 16, 2.0, 128, **constants),
        "an argument short": refused(x, x, 100, 16, **constants),
        "a tensor behind a number": refused(x, 100, x, 16, 2.0, **constants),
        "a flag as a number": refused(x, x, 100, True, 2.0, **constants),
    }
    print(json.dumps({"fault": FAULT, "launches": scaled() | tiled(), "refusals": refusals, "with a fault": with_a_fault()}))


if __name__ == "__main__":
    main()
