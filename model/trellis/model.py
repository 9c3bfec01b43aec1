"""`TrellisModel`: the interface that trainers and engines hold to; `docs/api/model-interfaces.md` is its contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from model.trellis.arguments import Call, check_call, check_loops
from model.trellis.audit import ModelParameterReport, audit
from model.trellis.backbone import Backbone
from model.trellis.bank import WHOLE, Shard
from model.trellis.block import Block
from model.trellis.config import TrellisConfig
from model.trellis.errors import ModelConfigError
from model.trellis.initial import initialise
from model.trellis.merge import merge_outputs, row_state
from model.trellis.output import TrellisOutput
from model.trellis.serving import Surplus, load_without_aux, split_aux
from model.trellis.settings import ModelSettings
from model.trellis.state import ModelState, check_state, zero_state


class TrellisModel(Backbone):
    """The backbone. Construction fills parameters from `seed` (on the meta device: none) and audits them: ParameterAuditError.

    `shard` says which rows of the bank's value table this process holds; the audit counts the whole table.
    """

    def __init__(
        self, config: TrellisConfig, settings: ModelSettings | None = None, *, seed: int = 0, shard: Shard = WHOLE
    ) -> None:
        super().__init__(config, settings or ModelSettings(), shard)
        self._report = self.parameter_report(refresh=True)
        if not self.embedding.weight.is_meta:
            initialise(self, config, seed, self.bank.shard)

    def forward(
        self,
        token_ids: torch.Tensor,
        k: int | None = None,
        state: ModelState | None = None,
        readout_mode: str | None = None,
        dfg_pairs: torch.Tensor | None = None,
        token_classes: torch.Tensor | None = None,
        plan: Sequence[torch.Tensor] | None = None,
        return_state: bool = False,
    ) -> TrellisOutput:
        """Training and prefill: `token_ids [B, n]` (or `[n]`) int64 through `k` loops, all tokens in each.

        `state` continues sequences. `plan` replaces the routers by k - 1 masks `[B, n]` bool. `dfg_pairs [B, p, 2]` and
        `token_classes [B, n]` are int64. Raises ModelConfigError, LoopEngineError, ModelStateError, before anything is written.
        """
        ids = token_ids
        if ids.dim() == 1:
            ids = ids.unsqueeze(0)
            token_classes = token_classes.unsqueeze(0) if token_classes is not None else None
        call = self._check(ids, k, readout_mode, dfg_pairs, token_classes, plan)
        batch, tokens = ids.shape
        if state is not None:
            state = self._check_state(state, batch, tokens)
        elif return_state:
            state = self.initial_state(batch, max(tokens, self.config.context))
        return self._run_rows(call, state, return_state=return_state, dropout=self.settings.dropout)

    def step(
        self,
        token_id: torch.Tensor | int,
        state: ModelState,
        k: int | None = None,
        readout_mode: str | None = None,
        dfg_pairs: torch.Tensor | None = None,
        token_classes: torch.Tensor | None = None,
        plan: Sequence[torch.Tensor] | None = None,
    ) -> TrellisOutput:
        """Decode one token of each sequence: `token_id [B, 1]`, `[B]` or a scalar. Without a plan every loop runs.

        Changes nothing it is given but rows of the global caches at or after `state.position`; `out.state` is the bundle to go on
        from. Draws no random numbers.
        """
        ids = torch.as_tensor(token_id, device=self.embedding.weight.device)
        ids = ids.reshape(-1, 1) if ids.dim() < 2 else ids
        if token_classes is not None and token_classes.dim() < 2:
            token_classes = token_classes.reshape(-1, 1)
        call = self._check(ids, k, readout_mode, dfg_pairs, token_classes, plan)
        if ids.shape[1] != 1:
            raise ModelConfigError(f"a step takes one token of each sequence, not {ids.shape[1]}")
        return self._run_rows(call, self._check_state(state, ids.shape[0], 1), return_state=True, dropout=0.0)

    def initial_state(
        self, batch: int, capacity: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ModelState:
        """Zeros for `batch` sequences of up to `capacity` tokens; `dtype` is that of the caches, by default the model's."""
        weight = self.embedding.weight
        where = weight.device if device is None else torch.device(device)
        return zero_state(self.state_shape(), batch, capacity, dtype=weight.dtype, cache_dtype=dtype or weight.dtype, device=where)

    def loop_capacity_schedule(self) -> tuple[float, ...]:
        """Shares of the tokens that may run loops 1 to K_max."""
        return tuple(float(rho) for rho in self.config.capacities)

    def expected_loops(self) -> float:
        """Loops that an average token runs at K_max."""
        return float(sum(self.config.capacities))

    def effective_depth(self, k: int) -> int:
        """Layers on the path of a token that runs k loops. Raises LoopEngineError for k outside [1, K_max]."""
        loops = check_loops(k if k is not None else 0, self.config.k_max)
        return len(self.config.prelude) + len(self.config.coda) + loops * len(self.config.core)

    def parameter_report(self, refresh: bool = False) -> ModelParameterReport:
        """The audit made at construction, or a new one."""
        if refresh:
            sizes = {key: parameter.numel() for key, parameter in self.named_parameters()}
            sizes["bank.values"] *= self.bank.shard.world
            self._report = audit(self.config, sizes)
        return self._report

    @property
    def all_layers(self) -> tuple[Block, ...]:
        """The unique layers in order; the core appears once."""
        return (*self.prelude.blocks(), *self.core.blocks(), *self.coda.blocks())

    @property
    def core_layers(self) -> tuple[Block, ...]:
        """The layers of the core block."""
        return tuple(self.core.blocks())

    def strip_aux_heads(self) -> dict[str, torch.Tensor]:
        """A serving state dictionary: all tensors, shared, but those of the auxiliary heads. The model keeps them."""
        return split_aux(self.state_dict())[0]

    def stripped_keys(self) -> tuple[str, ...]:
        """The keys that `strip_aux_heads` leaves out, sorted."""
        return split_aux(self.state_dict())[1]

    def load_serving_state_dict(self, sd: dict[str, torch.Tensor], strict: bool = True) -> Surplus:
        """Load a dictionary with or without auxiliary heads -> (load_result, surplus_keys); see `load_without_aux`."""
        return load_without_aux(self, sd, strict=strict)

    def _check(
        self,
        ids: torch.Tensor,
        k: object,
        readout_mode: object,
        dfg_pairs: torch.Tensor | None,
        token_classes: torch.Tensor | None,
        plan: Sequence[torch.Tensor] | None,
    ) -> Call:
        return check_call(
            self.config,
            self.settings,
            ids,
            k=k,
            readout_mode=readout_mode,
            dfg_pairs=dfg_pairs,
            token_classes=token_classes,
            plan=plan,
        )

    def _check_state(self, state: object, batch: int, tokens: int) -> ModelState:
        weight = self.embedding.weight
        return check_state(state, self.state_shape(), batch, tokens, dtype=weight.dtype, device=weight.device)

    def _run_rows(self, call: Call, state: ModelState | None, *, return_state: bool, dropout: float) -> TrellisOutput:
        batch = call.token_ids.shape[0]
        if not self.settings.batch_invariant or batch == 1:
            return self.run(call, state, return_state=return_state, dropout=dropout)
        rows = [
            self.run(call.row(b), None if state is None else row_state(state, b), return_state=return_state, dropout=dropout)
            for b in range(batch)
        ]
        return merge_outputs(rows, state if return_state else None)

    def __call__(self, *arguments: Any, **named: Any) -> TrellisOutput:
        """`forward`, through the module's hooks."""
        return super().__call__(*arguments, **named)
