"""The Trellis model of one rank, as `model.base.Model` describes it.

    h = E[ids];  h = prelude(h);  h = bank_0(h)
    h = loop_1(h);  for j >= 2: the rows that still run, h = loop_j(h); the others keep their bits
    h = bank_1(h);  h = coda(h);  logits = final_norm(h) E^T

Its parameters are those of the library's model without auxiliary heads, by the same names, but of the bank's value table this
rank's rows alone. Everything else is replicated, so that every rank routes alike; only the head multiplies with the tied matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from model.base import Communicator
from model.batch import ForwardBatch, ForwardOutput
from model.errors import BatchError
from model.fit import attention_fits
from model.spec import ModelSpec
from model.state.registry import StateRegistry
from model.trellis.attention import Attention
from model.trellis.bank import Shard
from model.trellis.block import Block
from model.trellis.config import GDN, TrellisConfig
from model.trellis.delta import GatedDelta
from model.trellis.errors import ModelConfigError
from model.trellis.graph import Graph, Part
from model.trellis.projection import NEUTRAL, Tuning
from model.trellis.served.attention import PagedAttention
from model.trellis.served.bank import MOST_RANKS, Reduce, read_bank
from model.trellis.served.delta import Pools, mix_slots
from model.trellis.served.loops import LoopSchedule, check_loops
from model.trellis.served.rows import Rows, every_row
from model.trellis.served.spec import state_names, trellis_spec
from model.trellis.settings import ModelSettings, ShardMode


@dataclass(kw_only=True, slots=True)
class Pass:
    """One forward: the state it writes, its attention, all of its rows, and the sum over ranks (None: there is one)."""

    state: StateRegistry
    attention: PagedAttention
    every: Rows
    reduce: Reduce | None


class ServedTrellis(Graph):
    """A model of one rank; parameters without values on `device` ("meta" too), which need no gradient.

    With `kernels`, GPU kernels run where the sizes allow them; torch otherwise. Raises ModelConfigError for a bank whose slots
    `world` ranks cannot share evenly.
    """

    def __init__(
        self,
        config: TrellisConfig,
        *,
        rank: int,
        world: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: bool = False,
    ) -> None:
        if world > MOST_RANKS:
            raise ModelConfigError(f"{world} ranks; the bank's reads are exact over at most {MOST_RANKS}")
        settings = ModelSettings(bank_shard_mode=ShardMode.FIXED)
        with torch.device(device):
            super().__init__(replace(config, aux=None), settings, Shard(rank, world, _not_here))
        self.to(dtype).requires_grad_(False)
        self._rank, self._world = rank, world
        self._kernels = kernels
        self._spec = trellis_spec(config)

    def spec(self) -> ModelSpec:
        """Sizes, layer kinds, caches and limits, as plain data. End tokens are the folder's to say."""
        return self._spec

    def static_decode(self, block_size: int) -> bool:
        """Whether a decode step of one loop may be captured in a graph: the torch forms take lengths from the host."""
        return self._fit(block_size)

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """`[T, d]` rows of the tied matrix."""
        return self.embedding(batch.token_ids)

    def forward(self, batch: ForwardBatch, state: StateRegistry, comm: Communicator) -> ForwardOutput:
        """One ragged forward; writes the caches and recurrent states of the batch's slots."""
        self._check(batch)
        inputs = h = self.embed(batch)
        run = self._open(batch, state, comm)
        h = self._layers(self.prelude, 0, h, run)
        h, first = read_bank(self.bank, 0, h, run.reduce)
        h = self._loop(1, h, run.every, run)
        depths = None
        if batch.loops is not None:
            schedule = LoopSchedule(batch, batch.loops, run.every, self.engine.routers, self.exit_heads, comm)
            for loop in range(2, max(batch.loops.most) + 1):
                rows = schedule.rows(loop, h)
                if rows is None:
                    break
                h = self._loop(loop, h, rows, run)
            depths = schedule.depths
        h, second = read_bank(self.bank, 1, h, run.reduce)
        h = self._layers(self.coda, len(self.config.prelude) + len(self.config.core), h, run)
        output = self._output(batch, h)
        output.depths = depths
        if batch.routing:
            output.routing, output.inputs, output.outputs = torch.stack((first, second)), inputs, h
        return output

    def _output(self, batch: ForwardBatch, h: torch.Tensor) -> ForwardOutput:
        if not len(batch.wanted_rows):
            return ForwardOutput(logits=None)
        rows = self.final_norm(h.index_select(0, batch.wanted_rows))
        logits = self.embedding.logits(rows).float() if self._rank == 0 else None
        return ForwardOutput(logits=logits, hidden=rows if batch.hidden_rows else None)

    def _open(self, batch: ForwardBatch, state: StateRegistry, comm: Communicator) -> Pass:
        dtype = self.embedding.weight.dtype
        attention: type[PagedAttention] = PagedAttention
        reduce: Callable[..., torch.Tensor] = comm.reduce
        if self._kernels:
            from model.trellis.served.fused import KernelAttention, reduce_lanes

            attention = KernelAttention if self._fit(batch.block_size) else PagedAttention
            reduce = partial(reduce_lanes, comm=comm, dtype=dtype)
        return Pass(
            state=state,
            attention=attention(batch, state, self._rotary, dtype),
            every=every_row(batch, idle=attention is not PagedAttention),
            reduce=reduce if self._world > 1 else None,
        )

    def _fit(self, block_size: int) -> bool:
        return self._kernels and attention_fits(self.config.head_dim, block_size)

    def _layers(self, part: Part, first: int, h: torch.Tensor, run: Pass) -> torch.Tensor:
        """Prelude or coda, whose first layer has the number `first`."""
        for number, layer in enumerate(part.blocks(), start=first):
            h = _layer(layer, number, 0, h, NEUTRAL, run.every, run)
        return h

    def _loop(self, loop: int, h: torch.Tensor, rows: Rows, run: Pass) -> torch.Tensor:
        """The core over the rows that run `loop`; `h [T, d]`, in which the others keep their bits."""
        x = h if rows.index is None else h.index_select(0, rows.index)
        for place, layer in enumerate(self.core.blocks()):
            x = _layer(layer, len(self.config.prelude) + place, loop, x, self.specialisation.tuning(loop, place), rows, run)
        return x if rows.index is None else h.index_copy(0, rows.index, x)

    def _check(self, batch: ForwardBatch) -> None:
        """Raise BatchError for what this model cannot run; the same on every rank, before any collective."""
        if batch.host.max_seq > self._spec.max_positions:
            raise BatchError(f"a sequence of {batch.host.max_seq} positions; this model has {self._spec.max_positions}")
        if batch.inserted is not None or batch.positions.dim() != 1:
            raise BatchError("this model takes no images")
        if batch.captures:
            raise BatchError(f"captures of layers {list(batch.captures)}; this model's core has no one output")
        if batch.written_rows is not None:
            raise BatchError("rows in shared blocks; recurrent state cannot be shared")
        check_loops(batch, self.config.k_max)


def _layer(layer: Block, number: int, loop: int, h: torch.Tensor, tuning: Tuning, rows: Rows, run: Pass) -> torch.Tensor:
    """One layer over the rows that run: `h [m, d] -> [m, d]`."""
    x = layer.norm1(h, tuning.gain1)
    if layer.kind == GDN:
        assert isinstance(layer.mixer, GatedDelta)
        pools = Pools(*(run.state.recurrent(number, name) for name in state_names(loop)))
        mixed = mix_slots(layer.mixer, x, tuning, pools, rows)
    else:
        assert isinstance(layer.mixer, Attention)
        mixed = run.attention(layer.mixer, number, loop, x, tuning, rows)
    return layer.finish(h + mixed, tuning)


def _not_here(part: torch.Tensor) -> torch.Tensor:
    """The modules of the library keep a sum over ranks for life; here each forward brings its own."""
    raise RuntimeError("the reads of a served bank are summed by the forward that makes them")
