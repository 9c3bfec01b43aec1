"""What a forward or a step returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from model.trellis.settings import ReadoutMode
from model.trellis.state import ModelState

Applicator = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states `[..., d]` -> logits `[..., vocab]`: final norm, then the tied matrix."""


class AuxiliaryOutputs(dict[str, torch.Tensor]):
    """Logits of the auxiliary heads, by head name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopReadout:
    """Deep supervision after one executed loop: `hidden [B, n, d]` or `logits [B, n, vocab]`, according to the mode."""

    loop: int
    hidden: torch.Tensor | None
    logits: torch.Tensor | None
    applicator: Applicator

    def as_logits(self) -> torch.Tensor:
        """`[B, n, vocab]`, the same bits in both modes."""
        if self.logits is not None:
            return self.logits
        assert self.hidden is not None
        return self.applicator(self.hidden)


@dataclass(frozen=True, kw_only=True, slots=True)
class BankUtilization:
    """Of one read: slots read, how many different ones, their share of the table, and the entropy of the reads in nats."""

    reads: int
    unique_slots: int
    fraction: float
    entropy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BankReadout:
    """One read point: slot numbers, known before any value is touched, and their weights, both `[B, n, heads, top_k]`, detached."""

    indices: torch.Tensor
    weights: torch.Tensor
    slots: int

    @property
    def utilization(self) -> BankUtilization:
        """Counted when asked for, since counting waits for the device."""
        counts = self.indices.unique(return_counts=True)[1].double()
        share = counts / counts.sum()
        return BankUtilization(
            reads=self.indices.numel(),
            unique_slots=len(counts),
            fraction=len(counts) / self.slots,
            entropy=float(-(share * share.log()).sum()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrellisOutput:
    """The result of a call of B sequences and n tokens that ran K loops.

    logits `[B, n, vocab]`; one readout per loop; exit_logits `[K, B, n]`, None in a model of one loop; aux by head name, empty
    without heads; router_masks and router_scores `[B, n]` of boundaries j >= 2; one BankReadout per read point, none where the bank
    is switched off; loop_counts `[B, n]` int64; state None from a forward that was not asked for it.
    """

    logits: torch.Tensor
    readouts: tuple[LoopReadout, ...]
    exit_logits: torch.Tensor | None
    aux: AuxiliaryOutputs
    router_masks: tuple[torch.Tensor, ...]
    router_scores: tuple[torch.Tensor, ...]
    bank: tuple[BankReadout, ...]
    loop_counts: torch.Tensor
    executed_loops: int
    state: ModelState | None
    readout_mode: str
    readout_applicator: Applicator


def make_readout(loop: int, hidden: torch.Tensor, mode: str, applicator: Applicator) -> LoopReadout:
    """The readout of one loop in that mode."""
    if mode == ReadoutMode.LOGITS:
        return LoopReadout(loop=loop, hidden=None, logits=applicator(hidden), applicator=applicator)
    return LoopReadout(loop=loop, hidden=hidden, logits=None, applicator=applicator)
