"""Compiles the linear layers of few rows, each way, and the router's for sm_90, without a device; prints PTX by name as JSON.

A program of its own, since the suite's processes have chosen Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import few_rows_triton, router_triton

TYPES = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "sums": "*fp32", "turns": "*i32"}
TYPES |= {"router": "*bf16", "logits": "*fp32"} | dict.fromkeys(("stride", "rows", "columns", "depth", "share", "lines"), "i32")
TILES = {"ROWS": 8, "BLOCK_N": 16, "BLOCK_K": 256, "PARTS": 4, "SPLITS": 1, "SWAP": True, "HELD": False, "EVEN_K": True}
TILES |= {"LINE": 64, "LINES": 32, "PRECISION": "tf32"}
ROWS, DOT = few_rows_triton._rows_kernel, few_rows_triton._dot_kernel
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows": (ROWS, {"BLOCK_N": 4, "BLOCK_K": 2048}),
    "held": (DOT, TILES | {"BLOCK_K": 2048, "HELD": True}),
    "streamed": (DOT, TILES),
    "shared": (DOT, TILES | {"BLOCK_N": 64, "PARTS": 1, "SPLITS": 8, "HELD": True, "ROWS": 16}),
    "row tiles": (DOT, TILES | {"PARTS": 1, "SWAP": False, "ROWS": 64}),
    "router": (router_triton._share_kernel, {"HIDDEN": 2048, "ROWS": 16, "OUTPUTS": 64, "DEPTH": 256}),
}


def compiled_way(kernel: Any, constants: dict[str, Any], *, warps: int = 4, types: dict[str, str] = TYPES) -> Any:
    """As the device compiles it: pointers and sizes are multiples of 16."""
    constants = constants | {"bias": None, "PDL": True}
    signature, values, attrs = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = types.get(name, "constexpr")
        if signature[name] == "constexpr":
            values[(place,)] = constants[name]
        elif name != "rows":
            attrs[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "launch_pdl": True})
    assert compiled.asm["cubin"]
    return compiled


def ptx(kernel: Any, constants: dict[str, Any]) -> str:
    """Of a bfloat16 kernel of four warps."""
    return str(compiled_way(kernel, constants).asm["ptx"])


def router_memory(rows: int, element: int) -> int:
    """Bytes of shared memory of a program of the router's sums."""
    block, outputs, depth, warps = router_triton.share_tile(rows, element)
    types = TYPES | dict.fromkeys(("x", "router"), {2: "*bf16", 4: "*fp32"}[element])
    constants = {"HIDDEN": 2048, "ROWS": block, "OUTPUTS": outputs, "DEPTH": depth}
    return int(compiled_way(router_triton._share_kernel, constants, warps=warps, types=types).metadata.shared)


if __name__ == "__main__":
    memory = {f"{rows} x {element}": router_memory(rows, element) for rows in (32, 33) for element in (2, 4)}
    json.dump({"ptx": {name: ptx(*way) for name, way in WAYS.items()}, "router memory": memory}, sys.stdout)
