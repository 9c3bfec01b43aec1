"""The arguments of a call, checked and brought into one form before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from model.trellis.config import TrellisConfig
from model.trellis.errors import LoopEngineError, ModelConfigError
from model.trellis.settings import BOUNDARY_CLASSES, ModelSettings, ReadoutMode


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """B sequences of n tokens: ids `[B, n]` int64, loops to run, and what `TrellisModel.forward` says of the rest."""

    token_ids: torch.Tensor
    k: int
    readout_mode: str
    dfg_pairs: torch.Tensor | None
    token_classes: torch.Tensor | None
    plan: tuple[torch.Tensor, ...]

    def row(self, b: int) -> Call:
        """The call of one sequence alone."""
        one = slice(b, b + 1)
        return Call(
            token_ids=self.token_ids[one],
            k=self.k,
            readout_mode=self.readout_mode,
            dfg_pairs=None if self.dfg_pairs is None else self.dfg_pairs[one],
            token_classes=None if self.token_classes is None else self.token_classes[one],
            plan=tuple(mask[one] for mask in self.plan),
        )


def check_call(
    config: TrellisConfig,
    settings: ModelSettings,
    token_ids: torch.Tensor,
    *,
    k: object,
    readout_mode: object,
    dfg_pairs: torch.Tensor | None,
    token_classes: torch.Tensor | None,
    plan: Sequence[torch.Tensor] | None,
) -> Call:
    """The call, or ModelConfigError or LoopEngineError naming what is wrong. `token_ids` is `[B, n]` by now."""
    _check_ids(token_ids, config.vocab_size)
    loops = check_loops(k, config.k_max)
    mode = settings.readout_mode if readout_mode is None else readout_mode
    if not isinstance(mode, str) or mode not in set(ReadoutMode):
        raise ModelConfigError(f"readout_mode = {mode!r} is none of {', '.join(ReadoutMode)}")
    batch, tokens = token_ids.shape
    if dfg_pairs is not None and (dfg_pairs.dim() != 3 or dfg_pairs.shape[0] != batch or dfg_pairs.shape[2] != 2):
        raise ModelConfigError(f"dfg_pairs is {tuple(dfg_pairs.shape)}, not (batch = {batch}, pairs, 2)")
    _check_range("dfg_pairs", dfg_pairs, tokens)
    if token_classes is not None and token_classes.shape != token_ids.shape:
        raise ModelConfigError(f"token_classes is {tuple(token_classes.shape)}, token_ids {tuple(token_ids.shape)}")
    _check_range("token_classes", token_classes, BOUNDARY_CLASSES)
    return Call(
        token_ids=token_ids,
        k=loops,
        readout_mode=mode,
        dfg_pairs=dfg_pairs,
        token_classes=token_classes,
        plan=check_plan(plan, loops, (batch, tokens), nested=settings.router.nested),
    )


def check_loops(k: object, k_max: int) -> int:
    """K, by default K_max; LoopEngineError for anything but an int from 1 to K_max."""
    if k is None:
        return k_max
    if type(k) is not int or not 1 <= k <= k_max:
        raise LoopEngineError(f"k = {k!r} is not an integer from 1 to {k_max}")
    return k


def check_plan(
    plan: Sequence[torch.Tensor] | None, loops: int, shape: tuple[int, int], *, nested: bool
) -> tuple[torch.Tensor, ...]:
    """The masks of boundaries 2 to K, or none. Raises LoopEngineError for masks that do not fit the call or revive a token."""
    if plan is None:
        return ()
    if not isinstance(plan, Sequence) or len(plan) != loops - 1:
        raise LoopEngineError(f"a plan for k = {loops} is a sequence of {loops - 1} masks, one for each boundary")
    for boundary, mask in enumerate(plan, start=2):
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != shape:
            raise LoopEngineError(f"the plan's mask of boundary {boundary} is not a bool tensor of shape {shape}")
    if nested:
        for boundary, (earlier, later) in enumerate(pairwise(plan), start=3):
            if bool((later & ~earlier).any()):
                raise LoopEngineError(
                    f"the plan's mask of boundary {boundary} revives a token that boundary {boundary - 1} dropped"
                )
    return tuple(plan)


def _check_ids(token_ids: torch.Tensor, vocab: int) -> None:
    if token_ids.dim() != 2 or 0 in token_ids.shape:
        raise ModelConfigError(f"token_ids is {tuple(token_ids.shape)}, not (batch, tokens) with at least one of each")
    _check_range("token_ids", token_ids, vocab)


def _check_range(name: str, values: torch.Tensor | None, stop: int) -> None:
    if values is None:
        return
    if values.dtype != torch.int64:
        raise ModelConfigError(f"{name} is {values.dtype}, not torch.int64")
    if values.numel() and (int(values.min()) < 0 or int(values.max()) >= stop):
        raise ModelConfigError(f"{name} holds values from {int(values.min())} to {int(values.max())}, outside [0, {stop})")
