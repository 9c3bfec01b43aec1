"""Steps of whole models without a device, of more sizes than `variants` looks at; prints what these bring that is new, as JSON.

A program of its own, since the suite's processes have chosen Triton's interpreter.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ep_runtime.bench.configs import write_config
from ep_runtime.engine.ahead.dry import DrySteps, variants
from ep_runtime.engine.ahead.job import Job, Variant
from ep_runtime.engine.ahead.noting import noting

MOST = 8192
MODELS = [("qwen3-30b-a3b", 1, 0), ("qwen3.5-35b-a3b", 2, 1)]
ROWS = [*range(1, 140, 9), 255, 256, 257, 511, 512, 513, 1000, 4095, 4096, 8191, 8192]
SPANS = [
    ([5, 1, 16, 1], [5, 3000, 1616, 1]),
    ([1] * 40, list(range(1, 41))),
    ([17, 2, 2], [2017, 2, 3]),
    ([1, 1, 1, 2], [9, 9, 9, 9]),
]


def found(name: str, world: int, rank: int) -> dict[str, Any]:
    """Names of all kernels of a model, and of those that steps of other sizes need besides."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(name, Path(folder), None)
        job = Job(
            folder=folder,
            rank=rank,
            world=world,
            dtype="bfloat16",
            layout="tensor",
            device="NVIDIA H200",
            capability=90,
            block_size=16,
            max_slots=96,
            max_rows=MOST,
            max_model_len=8192,
            buckets=[1, 2, 4, 8, 16, 32, 64, 96],
            peers=world > 1,
            processes=1,
            local_rank=rank,
            local_ranks=world,
        )
        known = variants(job)
        rows = sorted({*ROWS, *random.Random(0).sample(range(1, MOST), 16)})
        with torch.inference_mode(), noting(job.capability) as noted:
            steps = DrySteps(job)
            for count in rows:
                steps.of_rows(count)
                if count > 1:
                    steps.eager([1, count - 1], [1 + count % 3000, count - 1])
            for query_lens, seq_lens in SPANS:
                steps.eager(query_lens, seq_lens)
        new = [variant.name for variant in noted if variant not in set(known)]
        return {"names": sorted({each.name for each in known}), "new": new, "numbers": compiled_for_numbers(known)}


def compiled_for_numbers(known: list[Variant]) -> list[str]:
    """Kernels of which two variants differ in nothing but whether a number is a multiple of 16, or 1."""
    kinds: dict[str, list[str]] = {}
    for variant in known:
        told = json.loads(variant.data)
        types = list(told["signature"].values())
        attributes = {key[0]: value for key, value in zip(told["attrs_keys"], told["attrs_vals"], strict=True)}
        constants = dict(zip((key[0] for key in told["constant_keys"]), told["constant_vals"], strict=True))
        pointers = [attributes.get(place) for place, kind in enumerate(types) if kind.startswith("*")]
        fixed = {place: value for place, value in constants.items() if types[place] == "constexpr"}
        kinds.setdefault(json.dumps([variant.name, types, pointers, fixed, told["options"]]), []).append(variant.name)
    return [names[0] for names in kinds.values() if len(names) > 1]


if __name__ == "__main__":
    json.dump([found(*model) for model in MODELS], sys.stdout)
