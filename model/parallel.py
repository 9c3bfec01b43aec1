"""Who holds what: the shards of the vocabulary and the homes of the experts, as plain data that every rank computes alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Parallel:
    """This process's place among the ranks."""

    rank: int
    world: int

    def __post_init__(self) -> None:
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world}")

    def vocab_shard(self, vocab_size: int) -> int:
        """Rows of every rank's vocabulary shard, padding included: ceil(vocab_size / world)."""
        return -(-vocab_size // self.world)

    def vocab_rows(self, vocab_size: int, rank: int | None = None) -> range:
        """The vocabulary rows of a rank (this one by default), without padding: the last shards may be short or empty."""
        shard = self.vocab_shard(vocab_size)
        start = min(shard * (self.rank if rank is None else rank), vocab_size)
        return range(start, min(start + shard, vocab_size))


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Where each logical expert lives: `homes[e]` lists its (rank, local index) pairs, the owner first and replicas after it."""

    world: int
    homes: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def build(cls, num_experts: int, world: int) -> ExpertPlacement:
        """Contiguous and balanced, the first ranks taking the remainder: 10 over 4 gives 3, 3, 2, 2. Ranks may stay empty."""
        base, extra = divmod(num_experts, world)
        counts = (base + (rank < extra) for rank in range(world))
        return cls(world, tuple(((rank, local),) for rank, count in enumerate(counts) for local in range(count)))

    @property
    def num_experts(self) -> int:
        """Logical experts."""
        return len(self.homes)

    def local(self, rank: int) -> tuple[int, ...]:
        """The experts that `rank` holds, in the order of their local indices."""
        held = [(local, expert) for expert, homes in enumerate(self.homes) for home, local in homes if home == rank]
        return tuple(expert for _, expert in sorted(held))

    def owner(self, expert: int) -> tuple[int, int]:
        """(rank, local index) of the expert's first home."""
        return self.homes[expert][0]

    def table(self) -> np.ndarray:
        """int32 `[num_experts, 2]`: rank and local index. Replicas widen it by two columns each, -1 where an expert has fewer."""
        replicas = max((len(homes) for homes in self.homes), default=1)
        table = np.full((self.num_experts, 2 * replicas), -1, dtype=np.int32)
        for expert, homes in enumerate(self.homes):
            table[expert, : 2 * len(homes)] = [value for home in homes for value in home]
        return table
