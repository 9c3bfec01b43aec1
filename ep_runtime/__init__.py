"""Expert-parallel inference runtime. `from ep_runtime import LLM, SamplingParams` for offline use, loaded when first asked for.

What starts and supervises processes imports this package too, and must not import torch for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ep_runtime.engine.vision.inputs import vision_input
    from ep_runtime.offline.llm import LLM
    from ep_runtime.offline.samples import SamplingParams

__all__ = ["LLM", "SamplingParams", "vision_input"]
HOMES = {
    "LLM": "ep_runtime.offline.llm",
    "SamplingParams": "ep_runtime.offline.samples",
    "vision_input": "ep_runtime.engine.vision.inputs",
}
"""The module of each name."""


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
