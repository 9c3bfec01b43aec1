"""Expert layers that are tuned: the measured models, on so many ranks that the experts of each are whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

WORLDS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Model:
    """One model's expert layer on one of `ranks` ranks."""

    name: str
    hidden: int
    units: int
    experts: int
    top_k: int
    ranks: int = 1

    @property
    def held(self) -> int:
        """Experts of this rank, the first ones."""
        return self.experts // self.ranks


PUBLISHED: Mapping[str, Model] = MappingProxyType(
    {
        "30b": Model("Qwen3-30B-A3B", 2048, 768, 128, 8),
        "35b": Model("Qwen3.5-35B-A3B", 2048, 512, 256, 8),
        "80b": Model("Qwen3-Next-80B-A3B", 2048, 512, 512, 10),
    }
)

MODELS: Mapping[str, Model] = MappingProxyType(
    {key if world == 1 else f"{key}-ep{world}": replace(model, ranks=world) for key, model in PUBLISHED.items() for world in WORLDS}
)
"""The layers by key: `30b` of one rank, `30b-ep4` of four."""
