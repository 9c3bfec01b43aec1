"""The graph of a Trellis model: prelude, bank read, one core block executed up to K_max times, bank read, coda, tied head.

h = E[ids];  h = prelude(h);  h = bank_0(h)
for j in 1..K:  h = loop_j(h)                      exit_logits[j], readouts[j] from h
h = bank_1(h);  h = coda(h);  z = final_norm(h);  logits = z E^T
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from model.trellis.arguments import Call
from model.trellis.attention import Place
from model.trellis.bank import Shard
from model.trellis.config import GDN, TrellisConfig
from model.trellis.delta import GdnState
from model.trellis.engine import LoopRun
from model.trellis.graph import Graph, Part
from model.trellis.heads import AuxiliaryHeads
from model.trellis.norm import wide
from model.trellis.output import AuxiliaryOutputs, BankReadout, TrellisOutput, make_readout
from model.trellis.projection import NEUTRAL
from model.trellis.settings import ModelSettings
from model.trellis.state import ModelState, StateShape, shape_of, zero_gdn
from model.trellis.window import Window, commit_window, fresh_window, open_window


class Backbone(Graph):
    """The modules of a model with its auxiliary heads, and one pass through them."""

    def __init__(self, config: TrellisConfig, settings: ModelSettings, shard: Shard) -> None:
        super().__init__(config, settings, shard)
        self.aux_heads = AuxiliaryHeads(config, config.aux) if config.aux is not None else None

    def state_shape(self) -> StateShape:
        """The state instances this graph needs, and their sizes."""
        return shape_of(self.config, key_bias=self.settings.boundary_bias is not None)

    def run(self, call: Call, state: ModelState | None, *, return_state: bool, dropout: float) -> TrellisOutput:
        """The whole graph on one batch. `state`, where there is one, has been checked and has room for the call."""
        batch, tokens = call.token_ids.shape
        gdn, windows = self._open(state, batch, tokens)
        place, bias = self._place(0 if state is None else state.position, tokens), self._key_bias(call)
        h = functional.dropout(self.embedding(call.token_ids), dropout, self.training)
        inner = self.config.prelude.count(GDN)
        outer = len(gdn) - self.config.coda.count(GDN)
        h, gdn_prelude = self._outer(self.prelude, h, gdn[:inner], 0, state, place, bias)
        banks: list[BankReadout] = []
        h = self._read_bank(0, h, banks)
        per_loop = self.config.core.count(GDN)
        loops = [gdn[inner + j * per_loop : inner + (j + 1) * per_loop] for j in range(call.k)]
        run: LoopRun = self.engine(h, place, loops, windows, call.plan)
        h = self._read_bank(1, run.hidden[-1], banks)
        written = len(self.config.prelude) - inner
        h, gdn_coda = self._outer(self.coda, h, gdn[outer:], written, state, place, bias)
        untouched = gdn[inner + call.k * per_loop : outer]
        after = None
        if return_state and state is not None:
            core = tuple(instance for states in run.gdn for instance in states)
            after = self._close(state, (*gdn_prelude, *core, *untouched, *gdn_coda), run.windows, tokens)
        return self._output(call, h, run, tuple(banks), after)

    def _open(self, state: ModelState | None, batch: int, tokens: int) -> tuple[tuple[GdnState, ...], tuple[Window, ...]]:
        shape, weight = self.state_shape(), self.embedding.weight
        if state is not None:
            return state.gdn, tuple(open_window(ring, state.position, tokens) for ring in state.sliding)
        windows = [
            fresh_window(shape, batch, tokens, dtype=weight.dtype, device=weight.device) for _ in range(shape.sliding_caches)
        ]
        return zero_gdn(shape, batch, dtype=weight.dtype, device=weight.device), tuple(windows)

    def _place(self, start: int, tokens: int) -> Place:
        """All tokens of the call, before any loop."""
        weight = self.embedding.weight
        cos, sin = self._rotary.tables(torch.arange(start, start + tokens, device=weight.device), wide(weight.dtype))
        return Place(0, start, tokens, None, cos, sin)

    def _key_bias(self, call: Call) -> torch.Tensor | None:
        """`[B, n]` float32: what the call's tokens have as keys of the global layers, where the settings give classes a bias."""
        values = self.settings.boundary_bias
        if values is None:
            return None
        if call.token_classes is None:
            return torch.zeros(call.token_ids.shape, device=call.token_ids.device)
        return torch.tensor(values, device=call.token_ids.device)[call.token_classes]

    def _outer(
        self,
        part: Part,
        h: torch.Tensor,
        gdn: tuple[GdnState, ...],
        cache: int,
        state: ModelState | None,
        place: Place,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, tuple[GdnState, ...]]:
        """Prelude or coda; `cache` is the number of its first global cache."""
        after: list[GdnState] = []
        for layer in part.blocks():
            if layer.kind == GDN:
                h, moved = layer.run_gdn(h, NEUTRAL, gdn[len(after)])
                after.append(moved)
            else:
                h = layer.run_global(h, NEUTRAL, None if state is None else state.global_kv[cache], place, bias)
                cache += 1
        return h, tuple(after)

    def _read_bank(self, point: int, h: torch.Tensor, banks: list[BankReadout]) -> torch.Tensor:
        if not self.settings.bank_enabled:
            return h
        h, readout = self.bank(point, h)
        banks.append(readout)
        return h

    def _close(self, state: ModelState, gdn: tuple[GdnState, ...], windows: tuple[Window, ...], tokens: int) -> ModelState:
        rings = zip(state.sliding, windows, strict=True)
        return replace(
            state,
            position=state.position + tokens,
            gdn=gdn,
            sliding=tuple(commit_window(ring, window, state.position, tokens) for ring, window in rings),
        )

    def _output(
        self, call: Call, h: torch.Tensor, run: LoopRun, banks: tuple[BankReadout, ...], state: ModelState | None
    ) -> TrellisOutput:
        z = self.final_norm(h)
        counts = torch.ones_like(call.token_ids)
        for mask in run.masks:
            counts = counts + mask
        readouts = (make_readout(j, x, call.readout_mode, self.apply_readout) for j, x in enumerate(run.hidden, start=1))
        return TrellisOutput(
            logits=self.embedding.logits(z),
            readouts=tuple(readouts),
            exit_logits=self.exit_heads.score(run.hidden) if self.config.k_max > 1 else None,
            aux=AuxiliaryOutputs() if self.aux_heads is None else self.aux_heads(z, call.dfg_pairs),
            router_masks=run.masks,
            router_scores=run.scores,
            bank=banks,
            loop_counts=counts,
            executed_loops=call.k,
            state=state,
            readout_mode=call.readout_mode,
            readout_applicator=self.apply_readout,
        )
