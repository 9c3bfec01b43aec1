"""A small mixture of experts that only holds parameters, its checkpoints in two layouts, and its weight maps, all made by hand."""

from __future__ import annotations

import torch
from torch import nn

from model.parallel import ExpertPlacement, Parallel
from model.pieces import Piece, WeightMap

HIDDEN, INNER, VOCAB = 6, 4, 11


class Norm(nn.Module):
    def __init__(self, zero_centered: bool = False) -> None:
        super().__init__()
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.empty(HIDDEN, dtype=torch.float32, device="meta"), requires_grad=False)


class Toy(nn.Module):
    """Embedding shard (tied to the head), a norm of each kind, and this rank's experts; `down` is stored transposed in memory."""

    def __init__(self, experts: int, parallel: Parallel, dtype: torch.dtype) -> None:
        super().__init__()
        local = len(ExpertPlacement.build(experts, parallel.world).local(parallel.rank))

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)

        self.embed = empty(parallel.vocab_shard(VOCAB), HIDDEN)
        self.norm = Norm()
        self.zero_norm = Norm(zero_centered=True)
        self.gate_up = empty(local, 2 * INNER, HIDDEN)
        self.down = nn.Parameter(empty(INNER, local, HIDDEN).movedim(0, -1), requires_grad=False)
        self.head = self.embed


def tensors(experts: int, *, fused: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint: one tensor an expert, or stacked experts stored `[experts, in, out]`."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    result = {"embed": random(VOCAB, HIDDEN), "norm": random(HIDDEN).float(), "zero_norm": random(HIDDEN).float()}
    if fused:
        return result | {"experts.gate_up": random(experts, HIDDEN, 2 * INNER), "experts.down": random(experts, INNER, HIDDEN)}
    for expert in range(experts):
        result[f"experts.{expert}.gate"] = random(INNER, HIDDEN)
        result[f"experts.{expert}.up"] = random(INNER, HIDDEN)
        result[f"experts.{expert}.down"] = random(HIDDEN, INNER)
    return result


def weight_map(experts: int, parallel: Parallel, *, fused: bool) -> WeightMap:
    rows = parallel.vocab_rows(VOCAB)
    placement = ExpertPlacement.build(experts, parallel.world)
    held = placement.local(parallel.rank)
    embed = Piece(name="embed", shape=(VOCAB, HIDDEN), source=(slice(rows.start, rows.stop),), target=(slice(0, len(rows)),))
    pieces = {
        "embed": (embed,) if rows else (),
        "norm.weight": (Piece(name="norm", shape=(HIDDEN,)),),
        "zero_norm.weight": (Piece(name="zero_norm", shape=(HIDDEN,)),),
    }
    if fused:
        span = (slice(held[0], held[-1] + 1),) if held else ()
        gate_up = Piece(name="experts.gate_up", shape=(experts, HIDDEN, 2 * INNER), source=span, transpose=True)
        down = Piece(name="experts.down", shape=(experts, INNER, HIDDEN), source=span, transpose=True)
        pieces |= {"gate_up": (gate_up,) if held else (), "down": (down,) if held else ()}
        return WeightMap(pieces=pieces, ignored=("mtp.",), foreign=frozenset({"experts.gate_up", "experts.down", "embed"}))
    gate_up_pieces, down_pieces = [], []
    for local, expert in enumerate(held):
        for half, part in enumerate(("gate", "up")):
            target = (local, slice(half * INNER, (half + 1) * INNER))
            gate_up_pieces.append(Piece(name=f"experts.{expert}.{part}", shape=(INNER, HIDDEN), target=target))
        down_pieces.append(Piece(name=f"experts.{expert}.down", shape=(HIDDEN, INNER), target=(local,)))
    pieces |= {"gate_up": tuple(gate_up_pieces), "down": tuple(down_pieces)}
    foreign = {f"experts.{expert}.{part}" for expert in range(experts) if expert not in held for part in ("gate", "up", "down")}
    return WeightMap(pieces=pieces, ignored=("mtp.",), foreign=frozenset(foreign | {"embed"}))
