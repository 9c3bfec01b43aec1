"""Compiles scatters and gathers of owned rows for sm_90, as they are launched, without a device; prints PTX and more as JSON.

A program of its own, since the suite's processes have chosen Triton's interpreter.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton

from ep_runtime.engine.ahead.noting import TargetDriver, noting
from ep_runtime.engine.resident import Resident
from kernels.pairs import Pairs
from kernels.peer_rows import gather_add_norm_rows, scatter_add_norm_rows

META = torch.device("meta")
WORLDS = (2, 8)
WIDTH, TOP_K = 2048, 8


def launch(world: int, rows: int) -> None:
    """Both, as in a layer of experts."""

    def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=META)

    memory = Resident().peers(world - 1, world, META, torch.bfloat16)[0].memory
    x, owners = some(rows, WIDTH), some(rows, dtype=torch.int64)
    pairs = Pairs(some(rows * TOP_K, WIDTH), some(rows, TOP_K, dtype=torch.int32), some(128, dtype=torch.int64))
    scatter_add_norm_rows(memory, pairs, owners, x, some(WIDTH), 1e-6, pdl=True)
    gather_add_norm_rows(memory, some(rows, WIDTH), owners, x, some(WIDTH), 1e-6, pdl=True)


def stack_bytes(cubin: bytes) -> int:
    """Of a thread, where registers that do not suffice go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", told.stdout + told.stderr)
    assert found is not None, told.stdout
    return int(found.group(1))


def main() -> None:
    """A few rows, and many, of one world after the other."""
    with noting(90) as noted:
        for world in WORLDS:
            for rows in (8, 2000):
                launch(world, rows)
    triton.runtime.driver.set_active(TargetDriver(90))
    compiled: list[dict[str, Any]] = []
    for variant in noted:
        made = getattr(importlib.import_module(variant.module), variant.name).preload(variant.data)
        told = {"name": variant.name, "ptx": made.asm["ptx"], "ir": made.asm["ttgir"]}
        compiled.append(told | {"stack": stack_bytes(made.asm["cubin"])})
    json.dump(compiled, sys.stdout)


if __name__ == "__main__":
    main()
