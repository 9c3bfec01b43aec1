"""Launches of a `Kernel` where the driver is a recorder: prints as JSON, for each launch, whether it agrees with Triton's own.

A program of its own, since the suite's processes have chosen Triton's interpreter. Kernels are compiled for sm_90; none runs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import json
from typing import Any

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.launch import Kernel, jit

LAUNCHED: list[tuple[Any, ...]] = []


class Utilities:
    """Of the driver: what a compiled kernel asks before it is first launched."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        return len(LAUNCHED), hash(binary), 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 17}


class Recorder:
    """The driver, as far as launches need it."""

    utils = Utilities()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: object, metadata: object) -> Any:
        return lambda *args: LAUNCHED.append(args)


@jit(do_not_specialize=["count"])
def scale_kernel(x, out, count, stride, factor, SIZE: tl.constexpr, TWICE: tl.constexpr):
    """Any kernel."""
    at = tl.arange(0, SIZE)
    value = tl.load(x + at * stride, mask=at < count, other=0.0)
    if out is not None:
        tl.store(out + at, value * factor * (2 if TWICE else 1), mask=at < count)


@jit
def tile_kernel(rows, out, SIZE: tl.constexpr):
    """A kernel with a tensor descriptor."""
    at = tl.arange(0, SIZE)
    tl.store(out + at[:, None] * SIZE + at[None, :], rows.load([0, 0]))


def seen(launch: tuple[Any, ...]) -> list[Any]:
    """Grid, stream, function and arguments of a launch; tensors by their address. Hooks and Triton's record of it are left out."""
    plain = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in launch]
    return [*plain[:5], *(str(each) if isinstance(each, TensorDescriptor) else each for each in plain[9:])]


def agrees(kernel: Kernel, grid: tuple[int, ...], *args: Any, **options: Any) -> dict[str, Any]:
    """Two launches, then Triton's: the kernels, what the driver saw, and whether the second launch took the short way."""
    first = kernel[grid](*args, **options)
    own, kernel.run = kernel.run, None
    try:
        second, short = kernel[grid](*args, **options), True
    except TypeError:
        second, short = first, False
    kernel.run = own
    third = kernel.run(*args, grid=grid, warmup=False, **options)
    launches = LAUNCHED[-3 if short else -2 :]
    same = all(seen(launch) == seen(launches[0]) for launch in launches)
    return {"kernel": id(first), "same": first is second is third and same, "short": short}


def refused(*args: Any, **options: Any) -> bool:
    """Whether a launch is refused: a kind cannot be told from a constant by its place, nor an argument's value kept."""
    try:
        scale_kernel[(1,)](*args, **options)
    except TypeError:
        return True
    return False


def main() -> None:
    """All cases, by name."""
    driver.set_active(Recorder())
    x, y = torch.zeros(256), torch.zeros(256, dtype=torch.bfloat16)
    options = {"SIZE": 128, "TWICE": False, "num_warps": 4}
    square = torch.zeros(64, 64, dtype=torch.float16)
    cases = {
        "plain": agrees(scale_kernel, (3,), x, x, 100, 16, 2.0, **options),
        "other numbers": agrees(scale_kernel, (1, 2, 3), x[4:], x, 7, 32, 0.5, **options),
        "odd stride": agrees(scale_kernel, (3,), x, x, 100, 17, 2.0, **options),
        "stride of one": agrees(scale_kernel, (3,), x, x, 100, 1, 2.0, **options),
        "wide stride": agrees(scale_kernel, (3,), x, x, 100, 1 << 40, 2.0, **options),
        "other dtype": agrees(scale_kernel, (3,), y, x, 100, 16, 2.0, **options),
        "nothing": agrees(scale_kernel, (3,), x, None, 100, 16, 2.0, **options),
        "unaligned": agrees(scale_kernel, (3,), x[1:], x, 100, 16, 2.0, **options),
        "parameter": agrees(scale_kernel, (3,), torch.nn.Parameter(x), x, 100, 16, 2.0, **options),
        "other constant": agrees(scale_kernel, (3,), x, x, 100, 16, 2.0, **options | {"TWICE": True}),
        "other option": agrees(scale_kernel, (3,), x, x, 100, 16, 2.0, **options | {"num_warps": 8}),
        "descriptor": agrees(tile_kernel, (1,), TensorDescriptor.from_tensor(square, [16, 16]), square, SIZE=16),
        "other tile": agrees(tile_kernel, (1,), TensorDescriptor.from_tensor(square, [32, 32]), square, SIZE=32),
        "other descriptor": agrees(tile_kernel, (1,), TensorDescriptor.from_tensor(y.view(16, 16), [16, 16]), square, SIZE=16),
    }
    refusals = [
        refused(x, x, 100, 16, 2.0, 128, TWICE=False),
        refused(x, x, 100, 16, factor=2.0, SIZE=128, TWICE=False),
        refused(x, x, 100, 16, 2.0, 128, False),
    ]
    print(json.dumps({"launches": cases, "refusals": refusals}))


if __name__ == "__main__":
    main()
