"""Whose slots, blocks and cached prefixes: a rank's where ranks divide the sequences, of all ranks where each keeps every one."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

from ep_runtime.scheduler.admission import admits
from ep_runtime.scheduler.blocks import BlockPool
from ep_runtime.scheduler.core import SchedulerLimits, Sequence
from ep_runtime.scheduler.prefix import PrefixTree
from ep_runtime.scheduler.slots import SlotPool

SEQUENCE_ROWS = 512
"""A prompt is computed anew on another owner rather than where one sequence more runs, if its known part is shorter than this."""


class Owner:
    """Owner `number` of those that divide the sequences: slots `number`, `number + owners` and so on, and blocks of its own.

    `running` and `draining` count its sequences in these states.
    """

    def __init__(self, number: int, limits: SchedulerLimits) -> None:
        self.number = number
        self.slots = SlotPool(limits.max_slots, number, limits.owners)
        self.tree = PrefixTree(limits.block_size)
        self.blocks = BlockPool(limits.num_blocks, on_evict=self.tree.forget)
        self.running = 0
        self.draining = 0

    def admits(self, blocks: int, hits: Items[int]) -> bool:
        """Whether a sequence that takes `blocks` blocks, `hits` of them known here, may start now."""
        need = blocks - len(hits) + self.blocks.unreferenced(hits)
        return self.slots.free > 0 and admits(need, self.blocks.available, self.running)

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """SchedulerError unless the books of slots, blocks and prefixes are those of `holders`, all its sequences with a slot."""
        self.slots.check_integrity()
        self.blocks.check_integrity([seq.blocks for seq in holders])
        self.tree.check_integrity(self.blocks)


class Place(NamedTuple):
    """Where a sequence may start, and the blocks that it would share there."""

    owner: Owner
    hits: list[int]


def choose(places: Items[Place], blocks: int, block_size: int) -> Place:
    """The best place for a sequence of `blocks` blocks: of those that admit it now, or of all if none does.

    That is where it is computed soonest: fewest positions to compute and fewest sequences beside it, the one weighed against the
    other by SEQUENCE_ROWS, then most blocks to grow into, then the lowest number.
    """
    if len(places) == 1:
        return places[0]
    able = [place for place in places if place.owner.admits(blocks, place.hits)]

    def weight(place: Place) -> tuple[int, int, int]:
        owner = place.owner
        rows = SEQUENCE_ROWS * owner.running - block_size * len(place.hits)
        return rows, -owner.blocks.available, owner.number

    return min(able or places, key=weight)
