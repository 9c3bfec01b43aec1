"""Runs forwards over one or several ranks in one process: slots, shuffled blocks, and ranks as threads in lockstep."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.base import Communicator, SingleRank
from model.batch import ForwardBatch, ForwardOutput
from model.decoder import Decoder
from model.state.registry import StateRegistry
from tests.support.weights import load_rank

BLOCK_SIZE = 8


class Lockstep:
    """Communicators of ranks that are threads. Sums go in rank order, in float32, as the contract says."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=60)
        self._parts: list[torch.Tensor | None] = [None] * world
        self.ranks = [LockstepRank(self, rank, world) for rank in range(world)]

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order."""
        self._parts[rank] = tensor.clone()
        self._barrier.wait()
        parts = [part for part in self._parts if part is not None]
        self._barrier.wait()
        assert len({(part.shape, part.dtype) for part in parts}) == 1, "ranks brought different shapes to a collective"
        return parts

    def abort(self) -> None:
        """Free the other ranks when one has failed."""
        self._barrier.abort()


@dataclass
class LockstepRank:
    """One rank's end; `launched` are the names of its collectives, in order."""

    group: Lockstep
    rank: int
    world: int
    launched: list[str] = field(default_factory=list)
    peers: None = None

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        self.launched.append("reduce")
        first, *others = self.group.exchange(self.rank, partial)
        total = first.float()
        for part in others:
            total = total + part
        return total.to(partial.dtype)

    def gather_to_head(self, shard: torch.Tensor) -> list[torch.Tensor] | None:
        self.launched.append("gather_to_head")
        parts = self.group.exchange(self.rank, shard)
        return parts if self.rank == 0 else None

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.launched.append("broadcast")
        tensor.copy_(self.group.exchange(self.rank, tensor)[0])


@dataclass
class Part:
    """One span of a forward: the next `tokens` of the sequence in `slot`, and which of its rows are wanted (None: all)."""

    slot: int
    tokens: Sequence[int]
    wanted: Sequence[int] | None = None


class Ranks:
    """Models of one folder on `world` ranks, each with its state, and the host's view of slots and blocks."""

    def __init__(
        self,
        path: Path,
        world: int = 1,
        *,
        max_slots: int = 6,
        num_blocks: int = 200,
        dtype: torch.dtype = torch.float32,
        load: Callable[[Path, int, int], Decoder] | None = None,
    ) -> None:
        load = load or (lambda path, rank, world: load_rank(path, rank, world, dtype=dtype))
        self.world = world
        self.models = [load(path, rank, world) for rank in range(world)]
        self.states = [
            StateRegistry(
                model.spec(), max_slots=max_slots, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype, device="cpu"
            )
            for model in self.models
        ]
        self.group = Lockstep(world)
        self.lengths = [0] * max_slots
        self.blocks: list[list[int]] = [[] for _ in range(max_slots)]
        self._free = np.random.default_rng(5).permutation(num_blocks).tolist()

    def free(self, slot: int) -> None:
        """The slot starts anew; its blocks keep what was in them."""
        self._free = self.blocks[slot] + self._free
        self.blocks[slot], self.lengths[slot] = [], 0
        for state in self.states:
            state.zero_slot(slot)

    def batch(self, parts: Sequence[Part], **options: Any) -> ForwardBatch:
        """The batch of these spans; lengths and blocks grow. `options` are set on it, or go to `from_spans`."""
        wanted: list[int] = []
        row = 0
        for part in parts:
            self.lengths[part.slot] += len(part.tokens)
            while len(self.blocks[part.slot]) * BLOCK_SIZE < self.lengths[part.slot]:
                self.blocks[part.slot].append(self._free.pop())
            offsets = range(len(part.tokens)) if part.wanted is None else part.wanted
            wanted += [row + offset for offset in offsets]
            row += len(part.tokens)
        batch = ForwardBatch.from_spans(
            query_lens=[len(part.tokens) for part in parts],
            seq_lens=[self.lengths[part.slot] for part in parts],
            slots=[part.slot for part in parts],
            block_tables=[self.blocks[part.slot] for part in parts],
            kv_write_from=[0] * len(parts),
            wanted_rows=wanted,
            token_ids=torch.tensor([token for part in parts for token in part.tokens]),
            block_size=BLOCK_SIZE,
            device="cpu",
            positions=options.pop("positions", None),
            inserted=options.pop("inserted", None),
        )
        for name, value in options.items():
            setattr(batch, name, value)
        return batch

    def run(self, batch: ForwardBatch | Sequence[ForwardBatch]) -> list[ForwardOutput]:
        """One forward on every rank, in lockstep; of one batch, or of one for each rank."""
        batches = [batch] * self.world if isinstance(batch, ForwardBatch) else batch
        comms: list[Communicator] = [SingleRank()] if self.world == 1 else list(self.group.ranks)

        def one(rank: int) -> ForwardOutput:
            try:
                with torch.inference_mode():
                    return self.models[rank](batches[rank], self.states[rank], comms[rank])
            except BaseException:
                self.group.abort()
                raise

        if self.world == 1:
            return [one(0)]
        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(one, range(self.world)))

    def logits(self, *parts: Part) -> torch.Tensor:
        """Logits of the wanted rows of one forward; other ranks give none, and all launched the same collectives."""
        outputs = self.run(self.batch(parts))
        assert all(output.logits is None for output in outputs[1:])
        assert all(rank.launched == self.group.ranks[0].launched for rank in self.group.ranks)
        assert outputs[0].logits is not None
        return outputs[0].logits

    def prompt(self, slot: int, tokens: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """Feed a prompt in chunks -> logits of all its rows."""
        chunk = chunk or len(tokens)
        return torch.cat([self.logits(Part(slot, tokens[at : at + chunk])) for at in range(0, len(tokens), chunk)])


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest absolute expected value."""
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.abs().max())
