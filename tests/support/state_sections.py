"""Sections of a digest, on the host."""

from __future__ import annotations

from collections.abc import Sequence

from ep_runtime.engine.digest import read_sums
from model.base import SingleRank
from model.state.registry import StateRegistry


def sections_of(state: StateRegistry, slots: Sequence[int]) -> dict[str, int]:
    """A u64 for each name that recurrent states bear, as a lone rank says it."""
    return read_sums(state.section_sums(slots), SingleRank())
