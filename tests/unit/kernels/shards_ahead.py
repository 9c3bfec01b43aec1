"""Compiles what finds, moves and sends tokens for sm_90, without a device, on the head and elsewhere; prints the PTX as JSON.

A program of its own, since the suite's processes have chosen Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import best_triton, shards_triton, start_triton

POINTERS = {"shard": "*bf16", "out": "*fp32", "values": "*fp32", "places": "*i32", "turns": "*i32", "abort": "*i32"}
POINTERS |= dict.fromkeys(("best", "buffers", "signals", "tokens", "slots", "last_tokens", "columns", "token_ids"), "*i64")
POINTERS |= dict.fromkeys(("positions", "lengths", "tables", "block_tables"), "*i32") | {
    "x": "*bf16",
    "kept": "*bf16",
    "table": "*bf16",
}
SCALARS = dict.fromkeys(("stride", "width", "vocab", "share", "first", "parts", "count"), "i32")
CONSTANTS: dict[str, Any] = {"BLOCK": 2048, "PARTS": 64, "WORLD": 2, "WORDS_AT": 1 << 23, "ROWS": 256, "LINE": 32, "SPINS": 1024}
CONSTANTS |= {"PDL": True, "TOLD_AT": 383 * 32, **dict.fromkeys(("buffers", "signals", "turns", "abort")), "BLOCK_SIZE": 16}

KERNELS = {
    "best": best_triton._best_kernel,
    "merge": best_triton._merge_kernel,
    "pick": shards_triton._pick_kernel,
    "send": shards_triton._send_kernel,
    "start": start_triton._start_kernel,
    "embed": start_triton._embed_kernel,
}


def compiled(name: str, rank: int, world: int = 2) -> list[Any]:
    """[name, rank, PTX], as the device compiles it: pointers and widths are multiples of 16."""
    kernel = KERNELS[name]
    pointers = (
        POINTERS | ({"rows": "*i64"} if name == "pick" else {}) | ({"slots": "*i32", "tables": "*i32"} if name == "start" else {})
    )
    scalars = SCALARS | ({"columns": "i32"} if name == "best" else {}) | ({"rows": "i32"} if name == "start" else {})
    constants = CONSTANTS | {"RANK": rank, "WORLD": world, "BLOCK": 1024 if name in ("send", "start") else 2048}
    signature, values, attrs = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        signature[argument] = (pointers | scalars).get(argument, "constexpr")
        if world == 1 and argument in ("buffers", "signals", "turns", "abort"):
            signature[argument] = "constexpr"
        if signature[argument] == "constexpr":
            values[(place,)] = constants[argument]
        elif argument not in ("count", "parts", "rows") or name == "pick":
            attrs[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1 if name == "merge" else 4})
    assert made.asm["cubin"]
    return [name, rank, made.asm["ptx"]]


if __name__ == "__main__":
    every = [(name, 0) for name in KERNELS] + [("merge", 1), ("send", 1)]
    for name in ("merge", "pick"):
        compiled(name, 0, world=1)
    json.dump([compiled(name, rank) for name, rank in every], sys.stdout)
