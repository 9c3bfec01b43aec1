"""Compiles the sums through peer memory for sm_90, without a device, each way of waiting; prints their PTX and IR as JSON.

A program of its own, since the suite's processes have chosen Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import one_shot_triton, one_shot_words_triton, peer_gather_triton, two_shot_triton

POINTERS = {"out": "*fp32", "buffers": "*i64", "signals": "*i64", "turns": "*i32", "abort": "*i32"}
POINTERS |= dict.fromkeys(("partial", "x", "weight", "normed", "shard"), "*bf16") | {"experts": "*i32", "local": "*i64"}
SCALARS = dict.fromkeys(("rows", "width", "half", "elements", "share"), "i32")
CONSTANTS: dict[str, Any] = {"shared": None, "shared_gate": None, "total": None, "shared_stride": 0, "gate_stride": 0, "eps": 1e-6}
CONSTANTS |= {"CAPACITY": 1 << 24, "REGION": 1 << 16, "RANK": 0, "WORLD": 2, "PROGRAMS": 256, "LINE": 32, "BLOCK": 2048}
CONSTANTS |= {"ADD": True, "SHARED": False, "ZERO_CENTERED": False, "SPINS": 1024, "TILES": 64, "ROWS": 4, "PARTS": 1}
CONSTANTS |= {"WORDS_AT": 1 << 23, "SLOT": 1 << 20, "TOP_K": 8, "PDL": True, "SHARE": 1 << 24}

KERNELS = {
    "sum": one_shot_triton.one_shot_kernel,
    "choices": one_shot_triton.one_shot_kernel,
    "two shots": two_shot_triton.two_shot_kernel,
    "gather": peer_gather_triton._gather_kernel,
    "words": one_shot_words_triton.one_shot_words_kernel,
}


def compiled(name: str, reader: str, pause: int) -> list[Any]:
    """As the device compiles it: pointers and sizes are multiples of 16. The IR keeps the order of the program, loops and all."""
    kernel = KERNELS[name]
    constants = CONSTANTS | {"READER": reader, "PAUSE": pause, "BLOCK": 1024 if name == "words" else 2048}
    given = POINTERS | SCALARS
    if name == "choices":
        constants |= {"ROWS": 2, "PARTS": 2}
    if name in ("sum", "two shots"):
        constants |= {"TOP_K": 0, "experts": None, "local": None}
        given = {argument: kind for argument, kind in given.items() if argument not in ("experts", "local")}
    signature, values, attrs = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        signature[argument] = given.get(argument, "constexpr")
        if signature[argument] == "constexpr":
            values[(place,)] = constants[argument]
        else:
            attrs[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16 if name == "words" else 8})
    assert made.asm["cubin"]
    return [name, reader, pause, made.asm["ptx"], made.asm["ttgir"]]


if __name__ == "__main__":
    ways = [("warps", 0), ("warps", 100), ("thread", 0), ("thread", 100), ("atomic", 0)]
    texts = [compiled(name, reader, pause) for name in ("sum", "gather") for reader, pause in ways]
    texts += [compiled("two shots", reader, 0) for reader in ("warps", "thread")]
    json.dump([*texts, compiled("choices", "thread", 0), compiled("words", "thread", 0)], sys.stdout)
