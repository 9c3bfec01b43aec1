"""Launches of Triton kernels without what Triton does again for each: it binds, names and inspects arguments, asks for settings.

`bind` gives a kernel its constants and options, once; what it returns launches it with tensors and numbers. It keeps the compiled
kernels that Triton found for launches of one kind. Two are of one kind if nothing differs that Triton compiles for: the types of
tensors, whether they begin at 16 bytes, and numbers, by their value, but for those that `do_not_specialize` names. So a number that
varies from step to step belongs there: otherwise each of its values takes Triton's own way once, and some are compiled anew.
A launch of a new kind takes Triton's way, and so does every one in the interpreter, or where Triton is not as told here (`FAULT`).
Triton's launch hooks, which its profiler Proton counts launches by, see nothing of direct ones.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# Triton has no types.

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor


def cdiv(value: int, by: int) -> int:
    """The quotient, rounded up. Triton's own serves kernels, too, and takes microseconds on the host; so does the next."""
    return -(-value // by)


def next_power_of_2(value: int) -> int:
    """The least power of 2 that is not less; 1 for 1 and less."""
    return 1 << max(value - 1, 0).bit_length()


def fault_of(kernel: Any, launcher: Any) -> str | None:
    """Why a compiled kernel and launcher of these classes cannot be launched directly; None if they can."""
    attributes = {*dir(kernel), *kernel.__init__.__code__.co_names}
    for name in ("run", "function", "packed_metadata"):
        if name not in attributes:
            return f"compiled kernels of Triton {triton.__version__} have no {name}"
    first = ["self", "gridX", "gridY", "gridZ", "stream", "function"]
    if list(inspect.signature(launcher.__call__).parameters)[: len(first)] != first:
        return f"the launcher of Triton {triton.__version__} does not take grid, stream and function first"
    return None


FAULT = fault_of(CompiledKernel, CudaLauncher)
if FAULT is not None:
    logging.getLogger(__name__).warning("kernels are launched by Triton itself, which takes longer: %s", FAULT)

Launch = Callable[..., Any]
"""`launch(grid, *tensors, *numbers)`: grid a tuple of three, tensors (or descriptors, or None) first, then integers and floats."""


def bind(kernel: Any, **constants: Any) -> Launch:
    """Launches of `kernel` with these constants, and options as `num_warps`. To be kept: what launches find is kept in it.

    The first launch raises TypeError where arguments are not in the order of `Launch`, or constants not behind them.
    """
    if FAULT is not None or not isinstance(kernel, triton.JITFunction):
        return lambda grid, *args: kernel[grid](*args, **constants)
    behind = tuple(constants[parameter.name] for parameter in kernel.params if parameter.is_constexpr)
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    tensors = 0
    fixed: list[bool] = []

    def first(key: tuple[Any, ...], grid: tuple[int, int, int], *args: Any) -> Any:
        _order(kernel, args)
        compiled = kernel[grid](*args, **constants)
        known[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata
        return compiled

    def launch(grid: tuple[int, int, int], *args: Any) -> Any:
        nonlocal tensors, fixed
        if not fixed and not tensors:
            tensors, fixed = _order(kernel, args)
        active = driver.active
        device = active.get_current_device()
        kind: list[Any] = [device]
        passed: list[Any] = []
        places = 0
        for each in args[:tensors]:
            if each is None:
                kind.append(None)
                passed.append(None)
            elif each.__class__ is TensorDescriptor:
                kind.append((each.base.dtype, *each.block_shape))
                passed.append(each)
            else:
                # Told the address, Triton's launcher asks neither the tensor nor the driver.
                place = each.data_ptr()
                places |= place
                kind.append(each.dtype)
                passed.append(place)
        if places & 15:
            kind.extend(place.__class__ is int and place & 15 for place in passed)
        numbers = args[tensors:]
        # Of a number that nothing is compiled for, only whether it takes 32 bits.
        kind += [number if compiled_for else number >> 31 for number, compiled_for in zip(numbers, fixed, strict=True)]
        found = known.get(key := tuple(kind))
        if found is None:
            return first(key, grid, *args)
        compiled, run, function, metadata = found
        run(*grid, active.get_current_stream(device), function, metadata, None, None, None, *passed, *numbers, *behind)
        return compiled

    return launch


def _order(kernel: Any, args: tuple[Any, ...]) -> tuple[int, list[bool]]:
    """How many arguments are tensors, and which of the numbers behind them are compiled for: the same in every launch."""
    if [parameter.is_constexpr for parameter in kernel.params] != [place >= len(args) for place in range(len(kernel.params))]:
        raise TypeError(f"{kernel.__name__}: {len(args)} arguments for {kernel.arg_names}; constants come behind them, by name")
    tensors = next((place for place, each in enumerate(args) if isinstance(each, (int, float))), len(args))
    if any(number.__class__ not in (int, float) for number in args[tensors:]):
        raise TypeError(f"{kernel.__name__}: tensors come first, then integers and floats")
    return tensors, [not parameter.do_not_specialize for parameter in kernel.params[tensors : len(args)]]
