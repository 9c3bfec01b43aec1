"""Steps of one loaded rank without the others, as `bench share` times them: the engine's own decode graphs, and its model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ep_runtime.bench.session import random_prompts
from ep_runtime.engine.block_tables import BlockTables
from ep_runtime.engine.graphs import DecodeGraphs
from ep_runtime.engine.rank import RankModel
from model.base import SingleRank
from model.batch import ForwardBatch, ForwardOutput
from model.state.registry import StateRegistry

WARM_STEPS = 4
"""Before the first that is timed."""

Step = Callable[[list[int]], ForwardOutput]
"""Runs with a token for each row."""


class ShareSteps:
    """What a rank's steps need beside its weights: decode steps of `batches` with `context` positions after each, and of prompts.

    The model has this rank's part of a world; its communicator says that it is alone, so that no step launches a collective.
    """

    def __init__(self, rank: RankModel, *, batches: Sequence[int], context: int, prompts: int, prompt_len: int) -> None:
        self._model, self._device = rank.loaded.model, rank.device
        self._vocab_size, self._block_size = rank.spec.vocab_size, rank.config.block_size
        self._context, self._prompts, self._prompt_len = context, prompts, prompt_len
        self._comm = SingleRank()
        slots = max(*batches, prompts)
        self._state = StateRegistry(
            rank.spec,
            max_slots=slots,
            num_blocks=max(max(batches) * self._blocks_for(context), prompts * self._blocks_for(prompt_len)),
            block_size=self._block_size,
            dtype=rank.dtype,
            device=rank.device,
        )
        length = max(context, prompt_len)
        self._tables = BlockTables(slots, self._blocks_for(length), rank.device)
        self._graphs: DecodeGraphs | None = None
        if rank.config.forward_mode == "graph" and self._model.static_decode(self._block_size):
            last_tokens = torch.zeros(slots, dtype=torch.int64, device=rank.device)
            bounds = {"block_size": self._block_size, "max_length": length}
            self._graphs = DecodeGraphs(self._model, self._state, self._comm, self._tables, last_tokens, **bounds)
            self._graphs.capture(batches)

    def decode(self, batch: int) -> Step:
        """A decode step of `batch` sequences, each at the same position whenever it runs. RuntimeError if its graph is missing."""
        last, size = self._context - 1, self._block_size
        blocks = self._blocks(batch, self._context)
        if self._graphs is None:
            return lambda tokens: self._forward([1] * batch, [self._context] * batch, blocks, tokens, range(batch))
        graphs, captured = self._graphs, self._graphs.bucket(batch)
        if captured is None or captured.rows != batch:
            raise RuntimeError(f"a decode step of {batch} rows could not be captured")
        for slot, table in enumerate(blocks):
            self._tables.set(slot, 0, table)
        places = [table[-1] * size + last % size for table in blocks]
        fixed = ([-1] * batch, [last] * batch, list(range(batch)), [self._context] * batch, places, [0] * batch)
        return lambda tokens: graphs.run(captured, np.array((tokens, *fixed), np.int64))

    def prompts(self) -> Step:
        """A step of whole prompts, each of which wants its last row's logits."""
        count, length = self._prompts, self._prompt_len
        blocks, wanted = self._blocks(count, length), range(length - 1, count * length, length)
        return lambda tokens: self._forward([length] * count, [length] * count, blocks, tokens, wanted)

    def tokens(self, steps: int, rows: int) -> list[list[int]]:
        """Drawn evenly, for so many steps that count."""
        return random_prompts(WARM_STEPS + 1 + steps, rows, self._vocab_size)

    def close(self) -> None:
        """Drop graphs and states."""
        if self._graphs is not None:
            self._graphs.close()
        self._state.close()

    def _blocks_for(self, length: int) -> int:
        return -(-length // self._block_size)

    def _blocks(self, sequences: int, length: int) -> list[list[int]]:
        """Blocks of their own for each sequence."""
        each = self._blocks_for(length)
        return [list(range(number * each, (number + 1) * each)) for number in range(sequences)]

    def _forward(
        self, lengths: list[int], ends: list[int], blocks: list[list[int]], tokens: list[int], wanted: range
    ) -> ForwardOutput:
        batch = ForwardBatch.from_spans(
            query_lens=lengths,
            seq_lens=ends,
            slots=range(len(lengths)),
            block_tables=blocks,
            kv_write_from=[0] * len(lengths),
            wanted_rows=wanted,
            token_ids=torch.tensor(tokens, dtype=torch.int64).to(self._device, non_blocking=True),
            block_size=self._block_size,
            device=self._device,
        )
        batch.routing = True
        return self._model.forward(batch, self._state, self._comm)


def step_times(step: Step, tokens: Sequence[list[int]], device: torch.device) -> list[float]:
    """Milliseconds from the end of each step to the end of the next, as the device has them; the first few are not counted."""
    if device.type != "cuda":
        ends = []
        for row in tokens:
            step(row)
            ends.append(1e3 * time.perf_counter())
        return np.diff(ends)[WARM_STEPS:].tolist()
    events = [torch.cuda.Event(enable_timing=True) for _ in tokens]
    for row, event in zip(tokens, events, strict=True):
        step(row)
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) for before, after in zip(events[WARM_STEPS:-1], events[WARM_STEPS + 1 :], strict=True)]


def count_choices(step: Step, tokens: Sequence[list[int]], held: Sequence[int]) -> tuple[float, float]:
    """The same steps again: how many `held` experts of a layer their rows hit, and the share of these in all choices; means.

    Raises RuntimeError when a value behind the last layer is not finite, or no layer routes.
    """
    hits, share, layers = 0, 0.0, 0
    for row in tokens:
        output = step(row)
        if output.routing is None or output.outputs is None:
            raise RuntimeError("no layer of this model routes")
        if not bool(torch.isfinite(output.outputs).all()):
            raise RuntimeError("values behind the last layer are not finite")
        for chosen in output.routing.cpu().numpy():
            here = np.isin(chosen, held)
            hits += len(np.unique(chosen[here]))
            share += float(here.mean())
            layers += 1
    return hits / layers, share / layers
