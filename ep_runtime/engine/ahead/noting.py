"""Triton without a device: kernels that are launched are noted instead, with all that they would be compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from ep_runtime.engine.ahead.job import Variant


class TargetDriver:
    """What Triton asks of a driver before it compiles: the target. There is no device."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only one."""
        return 0


class NotedKernel:
    """In the place of a compiled kernel: its launches note its variant."""

    function = packed_metadata = None

    def __init__(self, noted: dict[Variant, None]) -> None:
        self.variant: Variant | None = None
        self._noted = noted

    def launch_metadata(self, *_: Any) -> None:
        """Nobody asks for any."""

    def run(self, *_: Any) -> None:
        """A launch."""
        assert self.variant is not None, "Triton tells what it has compiled before it launches it"
        self._noted[self.variant] = None


@contextmanager
def noting(capability: int) -> Iterator[dict[Variant, None]]:
    """What is launched in here, in order; the caller may clear it. Nothing is compiled, and no tensor is read or written.

    For a process without a device: kernels that it has launched in here are not compiled for any other use afterwards.
    """
    noted: dict[Variant, None] = {}
    fresh: list[NotedKernel] = []
    functions: dict[Any, None] = {}

    def compile_nothing(*_: Any, **__: Any) -> NotedKernel:
        fresh.append(NotedKernel(noted))
        return fresh[-1]

    def told(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        fresh.pop().variant = Variant(module=fn.module, name=fn.name, data=compile["specialization_data"])
        functions[fn.jit_function] = None

    triton.runtime.driver.set_active(TargetDriver(capability))
    real, triton.compiler.compile = triton.compiler.compile, compile_nothing
    triton.knobs.runtime.jit_post_compile_hook = told
    try:
        yield noted
    finally:
        triton.compiler.compile = real
        triton.knobs.runtime.jit_post_compile_hook = None
        for function in functions:
            function.device_caches.clear()
