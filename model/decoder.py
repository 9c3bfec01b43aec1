"""The decoder that every family is an instance of: which layers it has, and how wide, is its configuration."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from model.base import Communicator
from model.batch import ForwardBatch, ForwardOutput
from model.config import LayerConfig, ModelConfig
from model.errors import BatchError
from model.layers.attention import Attention
from model.layers.build import Build
from model.layers.delta_net import GatedDeltaNet
from model.layers.head import VocabHead
from model.layers.mlp import Mlp
from model.layers.module import StepModule
from model.layers.moe import Moe
from model.layers.norm import RMSNorm
from model.layers.operators import Pending
from model.layers.rotary import Rotary
from model.layers.step import Step
from model.parallel import ExpertPlacement, Parallel
from model.spec import LayerKind, ModelSpec
from model.state.registry import StateRegistry
from model.vision.tower import VisionTower


class DecoderLayer(StepModule):
    """Pre-norm residual layer: a token mixer, then an MLP.

    With heads divided among ranks, the outputs of both are partial sums. With sequences divided, the mixer's are: each rank gives
    the rows of its own and zeros for the others, so that the sum over ranks is exactly what a row's owner computed. In a step whose
    rows stay with their owners (`Step.row_owner`), these rows are read from their owners instead, for experts alone: a dense MLP's
    output is used where it is right, too, in a rank's own rows.
    """

    def __init__(
        self, number: int, layer: LayerConfig, config: ModelConfig, held: tuple[int, ...], parallel: Parallel, build: Build
    ) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps, build, zero_centered=config.zero_centered)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, build, zero_centered=config.zero_centered)
        self.mixer: Attention | GatedDeltaNet
        if layer.kind is LayerKind.LINEAR:
            self.mixer = GatedDeltaNet(number, config, build)
        else:
            self.mixer = Attention(number, layer, config, build)
        experts = config.moe if layer.sparse else None
        self.moe = Moe(experts, config.hidden_size, held, parallel, build) if experts is not None else None
        self.mlp = None if self.moe is not None else Mlp(config.hidden_size, config.intermediate_size, build)
        self.divided = config.split > 1
        self.owned = config.owners > 1

    def forward(self, x: torch.Tensor, pending: Pending | None, step: Step) -> Pending:
        """Take the output of the layer before into the residual `x [T, hidden]`, in place; this layer's output is pending."""
        normed = step.operators.add_norm(x, pending, self.mixer_norm, step)
        mixed = self._mix_own(normed, step) if self.owned else self.mixer(normed, step)
        apart = self.owned and (self.moe is not None or step.row_owner is None)
        normed = step.operators.add_norm(x, Pending(mixed, partial=self.divided or apart, owned=apart), self.mlp_norm, step)
        if self.moe is not None:
            return self.moe(normed, step)
        assert self.mlp is not None
        return Pending(self.mlp(normed, step), partial=self.divided)

    def _mix_own(self, normed: torch.Tensor, step: Step) -> torch.Tensor:
        """The mixer's output `[T, hidden]`: in the rows of sequences that other ranks keep zeros, or where rows stay anything."""
        own = step.batch.own
        if own is None:
            mixed = self.mixer(normed, step)
            # An idle row goes into the output projection as zeros, and leaves as its bias.
            biased = self.mixer.out.bias is not None and step.row_owner is None
            return mixed * (step.batch.slots >= 0).unsqueeze(1) if biased else mixed
        mixed = torch.zeros_like(normed) if step.row_owner is None else torch.empty_like(normed)
        if step.own is not None:
            mixed.index_copy_(0, own.rows, self.mixer(normed.index_select(0, own.rows), step.own))
        return mixed


class Decoder(nn.Module):
    """A model of one rank, as `model.base.Model` describes it; `config` has this rank's sizes (`model.share`).

    Parameters need no gradient; run it in `torch.inference_mode` to save the bookkeeping of views.
    """

    def __init__(self, config: ModelConfig, spec: ModelSpec, parallel: Parallel, placement: ExpertPlacement, build: Build) -> None:
        super().__init__()
        self._spec = spec
        self._operators = build.operators
        self._rotary = Rotary(config.rope)
        # A tied table is also the head: its shards are padded to one size, and it has the layout of a weight.
        rows = parallel.world * parallel.vocab_shard(config.vocab_size) if config.tied else config.vocab_size
        self.embedding = build.weight(rows, config.hidden_size) if config.tied else build.vector(rows, config.hidden_size)
        held = placement.local(parallel.rank) if config.moe is not None else ()
        self.layers = nn.ModuleList(
            DecoderLayer(number, layer, config, held, parallel, build) for number, layer in enumerate(config.layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, build, zero_centered=config.zero_centered)
        self.head = VocabHead(config, parallel, build)
        self._vision = spec.vision
        self._owned = config.owners > 1
        # Images are encoded on the head; the other ranks get the rows.
        self.tower = VisionTower(config.vision, build) if config.vision is not None and parallel.rank == 0 else None

    def spec(self) -> ModelSpec:
        """Sizes, layer kinds, caches and limits, as plain data."""
        return self._spec

    def static_decode(self, block_size: int) -> bool:
        """Whether a decode step of this model may be captured in a graph."""
        mixers = [layer.mixer for layer in self.layers if isinstance(layer, DecoderLayer)]
        return all(self._operators.static(mixer, block_size) for mixer in mixers)

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """`[T, hidden]` input embeddings of the batch's tokens, and of its images in place of their placeholders."""
        x = functional.embedding(batch.token_ids, self.embedding)
        if batch.inserted is not None:
            x.index_copy_(0, batch.inserted.rows, batch.inserted.values[:, : self._spec.hidden_size])
        return x

    def forward(self, batch: ForwardBatch, state: StateRegistry, comm: Communicator) -> ForwardOutput:
        """One ragged forward; writes the caches and recurrent states of the batch's slots."""
        self._check(batch)
        x, inputs = self._enter(batch)
        step = self._step(batch, state, comm, x.dtype)
        if self._owned and batch.row_owner is not None and not batch.captures and self._operators.rows_stay(batch, comm, x):
            step.row_owner = batch.row_owner
        captures = {}
        pending = None
        for number, layer in enumerate(self.layers):
            pending = layer(x, pending, step)
            if number in batch.captures:
                self._operators.settle(x, pending, step)
                pending = None
                captures[number] = x.index_select(0, batch.wanted_rows)
            self._add_features(number, x, batch)
        routing = torch.stack(step.routing) if step.routing else None
        outputs = x if batch.routing and step.row_owner is None else None
        if not len(batch.wanted_rows):
            return ForwardOutput(logits=None, captures=captures, routing=routing, inputs=inputs, outputs=outputs)
        rows = self._operators.add_norm(x, pending, self.norm, step)
        if step.row_owner is not None:
            rows = self._operators.whole(rows, step)
            outputs = rows if batch.routing else None
        output = ForwardOutput(logits=None, captures=captures, routing=routing, inputs=inputs, outputs=outputs)
        if batch.leave_logits:
            output.left = self._operators.leave(self.head, rows, self.embedding, step)
        else:
            rows = rows.index_select(0, batch.wanted_rows)
        if output.left is None:
            output.logits = self.head(rows, self.embedding, comm)
        output.hidden = rows if batch.hidden_rows else None
        return output

    def _enter(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What enters layer 0, and the same again where the batch asks for `routing`: layers change the first."""
        if batch.leave_logits:
            return self._operators.embed(batch.token_ids, self.embedding)
        x = self.embed(batch)
        return x, x.clone() if batch.routing else None

    def _step(self, batch: ForwardBatch, state: StateRegistry, comm: Communicator, dtype: torch.dtype) -> Step:
        """The forward's step. What mixes tokens has its tables of the rows that this rank keeps, where they are apart."""
        own = None
        if batch.own is not None and batch.own.batch is not None:
            own = self._step(batch.own.batch, state, comm, dtype)
        prepared = self._operators.prepare(batch, self._rotary, dtype) if batch.own is None else None
        return Step(batch=batch, state=state, comm=comm, operators=self._operators, prepared=prepared, own=own)

    def _add_features(self, layer: int, x: torch.Tensor, batch: ForwardBatch) -> None:
        """Add the deepstack features that follow `layer` to the rows of images; what the layer gave may still be pending."""
        if batch.inserted is not None and self._vision is not None and layer < self._vision.deepstack:
            start = (1 + layer) * self._spec.hidden_size
            x.index_add_(0, batch.inserted.rows, batch.inserted.values[:, start : start + self._spec.hidden_size])

    def _check(self, batch: ForwardBatch) -> None:
        """Raise BatchError for what this model cannot run; the same on every rank, before any collective."""
        if batch.host.max_seq > self._spec.max_positions:
            raise BatchError(f"a sequence of {batch.host.max_seq} positions; this model has {self._spec.max_positions}")
        if batch.inserted is not None:
            width = 0 if self._vision is None else self._vision.row_width
            expected = (len(batch.inserted.rows), width)
            if not width or tuple(batch.inserted.values.shape) != expected:
                raise BatchError(f"inserted rows of shape {tuple(batch.inserted.values.shape)}; this model takes {expected}")
        strange = [number for number in batch.captures if not 0 <= number < self._spec.num_layers]
        if strange:
            raise BatchError(f"captures of layers {strange}; this model has {self._spec.num_layers}")
