"""The loop over the core block: loops outermost, all tokens of a call in each, and the routing between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from model.trellis.attention import Place
from model.trellis.block import Block
from model.trellis.config import GDN, TrellisConfig
from model.trellis.delta import GdnState
from model.trellis.router import CapacityRouter, RouterDecision, credit
from model.trellis.settings import ModelSettings
from model.trellis.specialisation import PerLoopSpecialisation
from model.trellis.window import Window

GdnStates = tuple[GdnState, ...]
Windows = tuple[Window, ...]
SegmentExecutor = Callable[..., Any]
"""Calls its first argument with the others: `torch.utils.checkpoint.checkpoint` with use_reentrant=False is one."""


def run_directly(function: Callable[..., Any], *arguments: Any) -> Any:
    """The executor that keeps activations."""
    return function(*arguments)


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that run equally many tokens: `rows [R]` of the batch (None: all), `index [R, m]` their tokens (None: all)."""

    rows: torch.Tensor | None
    index: torch.Tensor | None
    scores: torch.Tensor | None = None
    """`[R, m]` router scores of these tokens, where a gradient is due to them."""


class LoopRun(NamedTuple):
    """What the loops leave, in their order: hidden states, masks and scores of boundaries j >= 2, GDN states; and the windows."""

    hidden: tuple[torch.Tensor, ...]
    masks: tuple[torch.Tensor, ...]
    scores: tuple[torch.Tensor, ...]
    gdn: tuple[GdnStates, ...]
    windows: Windows


class LoopEngine(nn.Module):
    """Runs the core `k` times. `segment_executor` runs each `core_pass`; replace it to checkpoint activations."""

    def __init__(
        self, config: TrellisConfig, settings: ModelSettings, core: nn.ModuleList, specialisation: PerLoopSpecialisation
    ) -> None:
        super().__init__()
        self.routers = nn.ModuleDict(
            {
                str(j): CapacityRouter(config.d_model, rho, settings.router, config.eps)
                for j, rho in enumerate(config.capacities, start=1)
                if j > 1
            }
        )
        # In a tuple, so that the model's own modules get no second name here.
        self._graph = (core, specialisation)
        self.segment_executor: SegmentExecutor = run_directly

    def core_pass(self, h: torch.Tensor, place: Place, gdn: GdnStates, windows: Windows) -> tuple[torch.Tensor, GdnStates, Windows]:
        """One loop's core forward on `h [B, m, d]`: the unit of activation checkpointing.

        Pure: changes none of its arguments and draws no random numbers, so running it again gives the same bits.
        """
        layers, specialisation = self._graph
        gdn_after: list[GdnState] = []
        windows_after: list[Window] = []
        for number, layer in enumerate(layers):
            assert isinstance(layer, Block)
            tuning = specialisation.tuning(place.loop, number)
            if layer.kind == GDN:
                h, state = layer.run_gdn(h, tuning, gdn[len(gdn_after)])
                gdn_after.append(state)
            else:
                h, window = layer.run_sliding(h, tuning, windows[len(windows_after)], place)
                windows_after.append(window)
        return h, tuple(gdn_after), tuple(windows_after)

    def forward(
        self, h: torch.Tensor, place: Place, gdn: Sequence[GdnStates], windows: Windows, plan: Sequence[torch.Tensor]
    ) -> LoopRun:
        """`len(gdn)` loops over `h [B, n, d]`. `plan` holds the masks of boundaries j >= 2, or nothing: the routers decide."""
        hidden: list[torch.Tensor] = []
        masks: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        after: list[GdnStates] = []
        previous: torch.Tensor | None = None
        for loop, states in enumerate(gdn, start=1):
            groups = [Group(None, None)]
            if loop > 1:
                router = self.routers[str(loop)]
                assert isinstance(router, CapacityRouter)
                if plan:
                    mask, score = plan[loop - 2], router.scores(h)
                    groups = groups_of(mask)
                else:
                    decision: RouterDecision = router(h, previous)
                    mask, score = decision.mask, decision.scores
                    whole = decision.count == h.shape[1]
                    previous = None if whole else decision.positions
                    groups = [Group(None, previous, score if previous is None else score.gather(1, previous))]
                masks.append(mask)
                scores.append(score)
            for group in groups:
                h, states, windows = self._run_group(group, h, replace(place, loop=loop), states, windows)
            hidden.append(h)
            after.append(states)
        return LoopRun(tuple(hidden), tuple(masks), tuple(scores), tuple(after), windows)

    def _run_group(
        self, group: Group, h: torch.Tensor, place: Place, gdn: GdnStates, windows: Windows
    ) -> tuple[torch.Tensor, GdnStates, Windows]:
        """One core pass over the group's tokens; everything else keeps its bits."""
        if group.rows is None:
            return self._run_tokens(group, h, place, gdn, windows)
        rows = group.rows
        some_gdn = tuple(GdnState(*(part[rows] for part in state)) for state in gdn)
        some_windows = tuple(Window(*(part[rows] for part in window)) for window in windows)
        some, some_gdn, some_windows = self._run_tokens(group, h[rows], place, some_gdn, some_windows)
        return (
            h.index_copy(0, rows, some),
            tuple(GdnState(*_replaced(state, rows, new)) for state, new in zip(gdn, some_gdn, strict=True)),
            tuple(Window(*_replaced(window, rows, new)) for window, new in zip(windows, some_windows, strict=True)),
        )

    def _run_tokens(
        self, group: Group, h: torch.Tensor, place: Place, gdn: GdnStates, windows: Windows
    ) -> tuple[torch.Tensor, GdnStates, Windows]:
        chosen, spread = h, None
        if group.index is not None:
            spread = group.index.unsqueeze(-1).expand(-1, -1, h.shape[-1])
            chosen = h.gather(1, spread)
            place = replace(place, index=group.index, cos=place.cos[group.index], sin=place.sin[group.index])
        ran, gdn, windows = self.segment_executor(self.core_pass, chosen, place, gdn, windows)
        if group.scores is not None:
            ran = credit(ran, chosen, group.scores)
        return (ran if spread is None else h.scatter(1, spread, ran)), gdn, windows


def groups_of(mask: torch.Tensor) -> list[Group]:
    """The groups of a mask `[B, n]`, by count; sequences that run nothing are in none. Waits for the device."""
    counts = mask.sum(1).tolist()
    groups = []
    for count in sorted(set(counts) - {0}):
        rows = [row for row, value in enumerate(counts) if value == count]
        which = None if len(rows) == len(counts) else torch.tensor(rows, device=mask.device)
        some = mask if which is None else mask[which]
        index = None if count == mask.shape[1] else some.nonzero()[:, 1].view(len(rows), count)
        groups.append(Group(which, index))
    return groups


def _replaced(
    tensors: Sequence[torch.Tensor], rows: torch.Tensor, new: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (tensor.index_copy(0, rows, part) for tensor, part in zip(tensors, new, strict=True))
    return first, second
