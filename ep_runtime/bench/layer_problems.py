"""The problems that are measured, by name: each kernel of a layer but the experts', at sizes of real models and loads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ep_runtime.bench.layer_attention import Decode, Prefill, StepAttention, TorchPrefill
from ep_runtime.bench.layer_delta import Delta
from ep_runtime.bench.layer_inputs import NEXT, QWEN3, AddNorm, Inputs, halved
from ep_runtime.bench.layer_problem import Problem

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "add + norm 1 x 2048": partial(AddNorm, 1, 2048),
    "add + norm 128 x 2048": partial(AddNorm, 128, 2048),
    "add + norm 4096 x 2048": partial(AddNorm, 4096, 2048),
    "inputs Qwen3 1": partial(Inputs, QWEN3, 1),
    "inputs Qwen3 128": partial(Inputs, QWEN3, 128),
    "inputs Qwen3 4096": partial(Inputs, QWEN3, 4096),
    "inputs Next 128": partial(Inputs, NEXT, 128),
    "decode Qwen3 1 x 256": partial(Decode, QWEN3, [256]),
    "decode Qwen3 8 x 256": partial(Decode, QWEN3, [256] * 8),
    "decode Qwen3 32 x 256": partial(Decode, QWEN3, [256] * 32),
    "decode Qwen3 128 x 256": partial(Decode, QWEN3, [256] * 128),
    "decode Qwen3 1 x 32768": partial(Decode, QWEN3, [32768]),
    "decode Qwen3 32 x 4096": partial(Decode, QWEN3, [4096] * 32),
    "decode Qwen3 mixed": partial(Decode, QWEN3, [16384, *[256] * 31, 4096, 4096]),
    "decode Next 1 x 256": partial(Decode, NEXT, [256]),
    "decode Next 128 x 256": partial(Decode, NEXT, [256] * 128),
    "decode Next 32 x 4096": partial(Decode, NEXT, [4096] * 32),
    "step Qwen3 1 x 256": partial(StepAttention, QWEN3, [256]),
    "step Qwen3 128 x 256": partial(StepAttention, QWEN3, [256] * 128),
    "step Qwen3 1 x 8192": partial(StepAttention, QWEN3, [8192]),
    "step Next 1 x 256": partial(StepAttention, NEXT, [256]),
    "step Next 128 x 1024": partial(StepAttention, NEXT, [1024] * 128),
    "prefill Qwen3 1 x 4096": partial(Prefill, QWEN3, [4096], [4096]),
    "prefill Qwen3 2 x 4096": partial(Prefill, QWEN3, [4096] * 2, [4096] * 2),
    "prefill Qwen3 8 x 1024": partial(Prefill, QWEN3, [1024] * 8, [1024] * 8),
    "prefill Qwen3 32 x 256": partial(Prefill, QWEN3, [256] * 32, [256] * 32),
    "prefill Qwen3 512 at 16384": partial(Prefill, QWEN3, [16384], [512]),
    "prefill Qwen3 half 2 x 4096": partial(Prefill, halved(QWEN3), [4096] * 2, [4096] * 2),
    "prefill Next 1 x 4096": partial(Prefill, NEXT, [4096], [4096]),
    "prefill Next 8 x 1024": partial(Prefill, NEXT, [1024] * 8, [1024] * 8),
    "prefill Next half 2 x 4096": partial(Prefill, halved(NEXT), [4096] * 2, [4096] * 2),
    "prefill torch Qwen3 2 x 4096": partial(TorchPrefill, QWEN3, 4096, 2),
    "prefill torch Next 2 x 4096": partial(TorchPrefill, NEXT, 4096, 2),
    "delta 1": partial(Delta, [1]),
    "delta 8": partial(Delta, [1] * 8),
    "delta 32": partial(Delta, [1] * 32),
    "delta 128": partial(Delta, [1] * 128),
    "delta 1 x 4096": partial(Delta, [4096]),
    "delta 8 x 1024": partial(Delta, [1024] * 8),
    "delta ragged": partial(Delta, [63, 65, 2, 1000]),
}
"""Name -> how to make it."""
