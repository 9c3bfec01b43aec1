"""Launches of Triton kernels without what Triton does again for each: it binds and names all arguments, and asks for its settings.

A `Kernel` is a JIT function with a short way to the compiled kernel that an earlier launch of the same kind had. A kind is what
Triton itself specialises on: types of arguments, whether integers and addresses are one or multiples of 16, constants, options. A
kind that is new takes Triton's way, whose hooks see nothing else.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# Triton has no types.

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import triton
from triton.runtime import driver
from triton.runtime.jit import native_specialize_impl


def cdiv(value: int, by: int) -> int:
    """The quotient, rounded up. Triton's own serves kernels, too, and takes microseconds on the host; so does the next."""
    return -(-value // by)


def next_power_of_2(value: int) -> int:
    """The least power of 2 that is not less; 1 for 1 and less."""
    return 1 << max(value - 1, 0).bit_length()


class Kernel(triton.JITFunction):
    """A JIT function: `kernel[grid](*arguments, **constants_and_options)`. Raises TypeError for constants among the arguments."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Any]:
        return partial(self._launch, grid)

    def _launch(self, grid: Sequence[int], *args: Any, **options: Any) -> Any:
        active = driver.active
        device = active.get_current_device()
        backend = self.device_caches[device][3]
        kinds = [native_specialize_impl(backend, arg, False, True, True) for arg in args]
        key = (device, *kinds, *options, *options.values())
        known = self._known.get(key)
        if known is None:
            if any(parameter.is_constexpr != (parameter.num >= len(args)) for parameter in self.params):
                raise TypeError(f"{self.__name__}: arguments go by their place, constants by name")
            compiled = self.run(*args, grid=grid, warmup=False, **options)
            self._known[key] = compiled, tuple(options[name] for name in self.arg_names[len(args) :])
            return compiled
        compiled, constants = known
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *constants)
        return compiled


def jit(function: Any = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """`triton.jit` for kernels that the host launches: a `Kernel`, or what the interpreter has in its place."""
    if function is None:
        return partial(jit, do_not_specialize=do_not_specialize)
    if triton.knobs.runtime.interpret:
        return triton.jit(function, do_not_specialize=list(do_not_specialize))
    return Kernel(function, do_not_specialize=list(do_not_specialize))
