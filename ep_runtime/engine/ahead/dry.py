"""A model's steps without a device: forwards of tensors that have a shape and no memory, which tell what kernels they would launch.

The layers' own code chooses kernels and arguments, so that nothing is listed twice. Triton compiles a kernel anew for other dtypes
and constants, and for integers and addresses that are multiples of 16; without memory, a tensor's address is its offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ep_runtime.engine.ahead.job import Job, Variant
from ep_runtime.engine.ahead.noting import noting
from ep_runtime.engine.ahead.rows import covering_rows
from ep_runtime.engine.block_tables import BlockTables
from ep_runtime.engine.comm import GroupCommunicator
from ep_runtime.engine.epoch import LoneRank
from ep_runtime.engine.executor import EpochCommunicator
from ep_runtime.engine.graphs import FIELDS, DecodeGraphs, FixedRows
from ep_runtime.engine.host_memory import Exchange
from ep_runtime.engine.own_rows import all_own
from ep_runtime.engine.rank import DTYPES
from ep_runtime.engine.resident import Resident
from ep_runtime.engine.sampling.fused import FusedDraw
from kernels.checksum_triton import row_sums
from kernels.peer_memory import PeerMemory
from kernels.tuning import Tuning, load_table
from model.batch import ForwardBatch
from model.config import ModelConfig
from model.decoder import Decoder
from model.layers.fused import FusedOperators
from model.loader import AttentionLayout, prepare_model
from model.parallel import Parallel
from model.state.registry import StateRegistry

META = torch.device("meta")
LONG = 4096
"""Positions of a sequence that is long to every kernel."""


class DryGroup:
    """A process group without peers: what a collective would fill is left as it is."""

    def allgather(self, *_: Any) -> DryGroup:
        """Done."""
        return self

    gather = broadcast = allgather

    def wait(self, *_: Any) -> None:
        """It is done already."""


@dataclass(frozen=True, slots=True)
class DryPeers:
    """Peer memory that is connected to nobody's."""

    memory: PeerMemory

    def connect(self, exchange: Exchange) -> None:
        """There is nobody."""


def dry_ranks(job: Job) -> EpochCommunicator:
    """The communicator of an epoch, without the other ranks."""
    if job.world == 1:
        return LoneRank()
    group = GroupCommunicator(DryGroup(), job.rank, job.world, META, lambda: None)
    if job.peers:
        shown: Any = [DryPeers(one.memory) for one in Resident().peers(job.rank, job.world, META, DTYPES[job.dtype])]
        group.join_peers(lambda own: [own], shown)
    return group


class DrySteps:
    """Steps of one rank's model, each kind of layer once."""

    def __init__(self, job: Job) -> None:
        dtype = DTYPES[job.dtype]
        prepared = prepare_model(
            Path(job.folder),
            Parallel(job.rank, job.world),
            dtype=dtype,
            device=META,
            load_format="dummy",
            operators=FusedOperators(META, Tuning(load_table(job.device), lambda _: None)),
            attention_layout=cast("AttentionLayout", job.layout),
        )
        self._job = job
        self._owners = job.world if job.layout == "data" else 1
        self._slots = -(-job.max_slots // self._owners)
        self._spec = prepared.spec
        model, config = prepared.module, prepared.config
        assert isinstance(model, Decoder)
        assert isinstance(config, ModelConfig)
        model.layers = nn.ModuleList(model.layers[number] for number in first_of_each(config.layers))
        self._model = model
        self._blocks = -(-job.max_model_len // job.block_size)
        self._state = StateRegistry(
            self._spec,
            max_slots=self._slots,
            num_blocks=self._blocks * self._slots,
            block_size=job.block_size,
            dtype=dtype,
            device=META,
        )
        self._comm = dry_ranks(job)

    def captured(self, rows: int) -> None:
        """The decode step of one bucket."""
        job = self._job
        graphs = DecodeGraphs(
            self._model,
            self._state,
            self._comm,
            BlockTables(self._slots, self._blocks, META),
            torch.empty(job.max_slots, dtype=torch.int64, device=META),
            block_size=job.block_size,
            max_length=job.max_model_len,
        )
        fixed = FixedRows.of(rows, self._blocks, META)
        output = graphs.forward(torch.empty(len(FIELDS), rows, dtype=torch.int64, device=META), fixed)
        if output.left is not None and job.rank == 0:
            output.left.pick(fixed.numbers[:1])

    def eager(self, query_lens: Sequence[int], seq_lens: Sequence[int], *, parts: int = 1) -> None:
        """One step of spans outside of graphs; positions have so many `parts` (see `ForwardBatch`).

        Where ranks divide the sequences, all rows are this rank's: what mixes some of them is chosen by their number, as here.
        """
        rows = sum(query_lens)
        table = [0] * -(-max(seq_lens) // self._job.block_size)
        batch = ForwardBatch.from_spans(
            query_lens=query_lens,
            seq_lens=seq_lens,
            slots=[0] * len(query_lens),
            block_tables=[table] * len(query_lens),
            kv_write_from=[0] * len(query_lens),
            wanted_rows=range(rows) if len(query_lens) == rows else [rows - 1],
            token_ids=torch.empty(rows, dtype=torch.int64, device=META),
            block_size=self._job.block_size,
            device=META,
            positions=None if parts == 1 else np.zeros((parts, rows), dtype=np.int32),
        )
        if self._owners == 1:
            self._model.forward(batch, self._state, self._comm)
            return
        own = all_own(batch)
        # Of more ranks than two a step of prompts may take sums, by whose rows are in it (`Operators.rows_stay`).
        for busiest in (0, rows) if self._owners > 2 else (0,):
            self._model.forward(replace(own, busiest=busiest), self._state, self._comm)

    def of_rows(self, rows: int) -> None:
        """Steps of so many rows outside of graphs: pieces, and single rows alone."""
        longest = self._job.max_model_len
        pieces = shared_out(rows, longest)
        self.eager(pieces, pieces)
        if rows <= self._job.max_slots:
            for length in (1, min(longest, LONG)):
                self.eager([1] * rows, [length] * rows)

    def others(self) -> None:
        """Single rows beside a piece, whose numbers of rows those of pieces stand for; positions in three parts; digests; draws."""
        for length in (1, min(self._job.max_model_len, LONG)):
            self.eager([1, 2], [length, 2])
        if self._spec.vision is not None:
            self.eager([2], [2], parts=3)
        one = torch.empty(1, dtype=torch.int64, device=META)
        self._comm.feed(one, one, torch.empty(self._job.max_slots, dtype=torch.int64, device=META))
        for dtype in (torch.int16, torch.int32):
            row_sums(torch.empty(1, 2, dtype=dtype, device=META), one)
        if self._job.rank == 0:
            column, keys = torch.empty(1, device=META), torch.empty(1, 2, dtype=torch.int32, device=META)
            draw = {"temperature": column, "noise": column, "keys": keys}
            FusedDraw(self._spec.vocab_size, 1, META).draw(draw, torch.empty(1, self._spec.vocab_size, device=META))


def first_of_each(kinds: Sequence[Any]) -> list[int]:
    """The place of the first of each kind, ascending."""
    return [number for number, kind in enumerate(kinds) if kind not in kinds[:number]]


def shared_out(rows: int, most: int) -> list[int]:
    """As few parts of `rows` as possible, of at most `most`, none more than one row longer than another."""
    parts = -(-rows // most)
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def variants(job: Job) -> list[Variant]:
    """Every kernel that serving this rank's model launches, once for each kind of arguments."""
    found: dict[Variant, None] = {}
    with torch.inference_mode(), noting(job.capability) as noted:
        steps = DrySteps(job)
        for rows in job.buckets:
            steps.captured(rows)
        steps.others()

        def kinds(rows: int) -> frozenset[Variant]:
            found.update(noted)
            noted.clear()
            steps.of_rows(rows)
            return frozenset(noted)

        covering_rows(job.max_rows, kinds)
    found.update(noted)
    return list(found)
