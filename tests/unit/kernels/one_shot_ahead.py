"""Compiles the sums through peer memory for sm_90, without a device, each way of waiting; prints their PTX as JSON.

A program of its own, since the suite's processes have chosen Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import one_shot_triton

POINTERS = {"out": "*fp32", "buffers": "*i64", "signals": "*i64", "turns": "*i32", "abort": "*i32"}
POINTERS |= dict.fromkeys(("partial", "x", "weight", "normed", "shard"), "*bf16")
SCALARS = dict.fromkeys(("rows", "width", "elements", "share"), "i32")
CONSTANTS: dict[str, Any] = {"shared": None, "shared_gate": None, "total": None, "shared_stride": 0, "gate_stride": 0, "eps": 1e-6}
CONSTANTS |= {"CAPACITY": 1 << 24, "REGION": 1 << 16, "RANK": 0, "WORLD": 2, "PROGRAMS": 256, "LINE": 32, "BLOCK": 2048}
CONSTANTS |= {"ADD": True, "SHARED": False, "ZERO_CENTERED": False, "SPINS": 1024}


def ptx(kernel: Any, reader: str, pause: int) -> str:
    """As the device compiles it: pointers and sizes are multiples of 16."""
    constants = CONSTANTS | {"READER": reader, "PAUSE": pause}
    signature, values, attrs = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = (POINTERS | SCALARS).get(name, "constexpr")
        if signature[name] == "constexpr":
            values[(place,)] = constants[name]
        else:
            attrs[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"]
    return str(compiled.asm["ptx"])


if __name__ == "__main__":
    kernels = {"sum": one_shot_triton._one_shot_kernel, "gather": one_shot_triton._gather_kernel}
    ways = [("warps", 0), ("warps", 100), ("thread", 0), ("thread", 100), ("atomic", 0)]
    json.dump([[name, reader, pause, ptx(kernels[name], reader, pause)] for name in kernels for reader, pause in ways], sys.stdout)
