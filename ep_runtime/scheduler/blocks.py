"""The owner of cache blocks: reference counts, the free list, and cached blocks that may be evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from ep_runtime.scheduler.core import SchedulerError


class BlockPool:
    """Blocks `0 .. num_blocks - 1`.

    A block is held (referenced by sequences), free, or evictable: unreferenced, but with contents that the prefix tree knows. Free
    blocks are taken first, then the evictable one that was released longest ago; `on_evict` is told before its number is given out.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self._references = [0] * num_blocks
        self._cached = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def total(self) -> int:
        """All blocks."""
        return len(self._references)

    @property
    def available(self) -> int:
        """Blocks that can be taken now: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    def references(self, block: int) -> int:
        """How many sequences hold the block."""
        return self._references[block]

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would leave `available` by being shared."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def take(self) -> int:
        """One block for one holder; the caller has seen `available > 0`."""
        if self._free:
            block = self._free.pop()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            self._cached[block] = False
            self._on_evict(block)
        else:
            raise SchedulerError("no block is available")
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a cached block."""
        if self._references[block] == 0:
            if block not in self._evictable:
                raise SchedulerError(f"block {block} is shared but neither held nor evictable")
            del self._evictable[block]
        self._references[block] += 1

    def mark_cached(self, block: int) -> None:
        """The prefix tree knows the contents of this held block: it becomes evictable when its last holder leaves."""
        if self._references[block] == 0 or self._cached[block]:
            raise SchedulerError(f"block {block} is entered twice or by nobody")
        self._cached[block] = True

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less of each. Later blocks of a sequence are evicted before earlier ones, so a prefix stays whole."""
        references = self._references
        for block in reversed(blocks):
            if references[block] < 1:
                raise SchedulerError(f"block {block} is released but not held")
            references[block] -= 1
            if references[block] == 0:
                if self._cached[block]:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """SchedulerError unless every block is held by exactly `holders` (one block list a sequence), free or evictable."""
        expected = [0] * self.total
        for blocks in holders:
            for block in blocks:
                expected[block] += 1
        if expected != self._references:
            wrong = [block for block in range(self.total) if expected[block] != self._references[block]]
            raise SchedulerError(f"reference counts of blocks {wrong} are not their holders'")
        free = set(self._free)
        if len(free) != len(self._free):
            raise SchedulerError("a block is twice on the free list")
        for block, references in enumerate(self._references):
            places = (references > 0) + (block in free) + (block in self._evictable)
            if places != 1 or (block in free and self._cached[block]) or (block in self._evictable and not self._cached[block]):
                raise SchedulerError(f"block {block} has {references} holders and is in {places} places")

    def cached_blocks(self) -> list[int]:
        """Blocks whose contents the prefix tree knows, held or evictable, in number order."""
        return [block for block, cached in enumerate(self._cached) if cached]
