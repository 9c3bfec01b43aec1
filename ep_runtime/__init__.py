"""Expert-parallel inference runtime. `from ep_runtime import LLM, SamplingParams` for offline use, loaded when first asked for.

What starts and supervises processes imports this package too, and must not import torch for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ep_runtime.engine.vision.inputs import vision_input
    from ep_runtime.offline import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams", "vision_input"]
HOMES = {"vision_input": "ep_runtime.engine.vision.inputs"}
"""Modules of the names that are not of `ep_runtime.offline`."""


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module(HOMES.get(name, "ep_runtime.offline")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
