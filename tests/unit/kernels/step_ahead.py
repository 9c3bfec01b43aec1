"""Compiles the attention of decode steps for sm_90, without a device; prints the PTX of some configurations as JSON.

A program of its own, since the suite's processes have chosen Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.paged_step_triton import StepConfig, _step_kernel, default_step_config

POINTERS = {"cos": "*fp32", "sin": "*fp32", "places": "*i64", "block_tables": "*i32", "seq_lens": "*i32"}
POINTERS |= {"partial": "*fp32", "weights": "*fp32", "turns": "*i32"}
POINTERS |= dict.fromkeys(("projected", "q_norm", "k_norm", "k_cache", "v_cache", "out"), "*bf16")
SCALARS = dict.fromkeys(("row_stride", "table_stride", "table_width", "splits"), "i32") | {"eps": "fp32", "scale": "fp32"}
CONSTANTS: dict[str, Any] = {"HEADS": 16, "KV_HEADS": 2, "HEAD_DIM": 128, "HALF": 64, "BLOCK_SIZE": 16, "PACKED": 8, "MEMBERS": 8}
CONSTANTS |= {"WINDOW": 0, "NORM": True, "PLUS": 0.0, "GATED": False, "SPLIT": True, "PRECISION": "tf32", "PDL": True}


def ptx(config: StepConfig) -> str:
    """As the device compiles it: pointers and strides of rows are multiples of 16."""
    constants = CONSTANTS | {"TILE": config.tile, "STAGES": config.stages, "ALONE": 1, "CHUNK": 4}
    signature, values, attrs = {}, {}, {}
    for place, name in enumerate(_step_kernel.arg_names):
        signature[name] = (POINTERS | SCALARS).get(name, "constexpr")
        if signature[name] == "constexpr":
            values[(place,)] = constants[name]
        elif name in POINTERS or name == "row_stride":
            attrs[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=_step_kernel, signature=signature, constexprs=values, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": config.warps})
    assert compiled.asm["cubin"]
    return str(compiled.asm["ptx"])


if __name__ == "__main__":
    json.dump([ptx(default_step_config(rows, 2, 128, 32768)) for rows in (1, 128)], sys.stdout)
