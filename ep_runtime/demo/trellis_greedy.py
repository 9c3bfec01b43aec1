"""Greedy decoding with the library's own Trellis model, which judges the demo's training: what the server is to answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from model.trellis import ModelState, TrellisModel, TrellisOutput


@dataclass(frozen=True, slots=True)
class Decoded:
    """`tokens [batch, count]`, and `depths [batch, count]`: the loops of the row that gave each, 0 for a prompt's row."""

    tokens: torch.Tensor
    depths: torch.Tensor


@torch.inference_mode()
def greedy(model: TrellisModel, prompts: torch.Tensor, count: int, loops: int = 1, thresholds: Sequence[float] = ()) -> Decoded:
    """The next `count` tokens of `prompts [batch, length]`, of at most `loops` loops each.

    With `thresholds`, of loops 1 to `loops` - 1, a token stops after the first loop whose exit head gives it that probability.
    """
    batch, length = prompts.shape
    out = model(prompts, k=loops, state=model.initial_state(batch, length + count), return_state=True)
    chosen, depths = [], [torch.zeros(batch, dtype=torch.long)]
    while True:
        chosen.append(out.logits[:, -1].argmax(-1))
        if len(chosen) == count:
            return Decoded(torch.stack(chosen, 1), torch.stack(depths, 1))
        assert out.state is not None
        out, depth = _step(model, chosen[-1], out.state, loops, thresholds)
        depths.append(depth)


def _step(
    model: TrellisModel, tokens: torch.Tensor, state: ModelState, loops: int, thresholds: Sequence[float]
) -> tuple[TrellisOutput, torch.Tensor]:
    """A step whose plan is what the exit scores of a step through every loop say: those of a loop depend on none after it."""
    every = torch.full(tokens.shape, loops)
    out = model.step(tokens, state, k=loops)
    if not thresholds:
        return out, every
    assert out.exit_logits is not None
    scores = out.exit_logits[: loops - 1, :, 0].sigmoid()
    stops = scores >= torch.tensor(thresholds).unsqueeze(1)
    depths = torch.where(stops.any(0), stops.int().argmax(0) + 1, every)
    plan = [(depths >= loop).unsqueeze(1) for loop in range(2, loops + 1)]
    return model.step(tokens, state, k=loops, plan=plan), depths
