"""Served Trellis models made of the library's, and what both keep of a sequence, by the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from model.batch import ForwardOutput, LoopRows
from model.trellis import ModelState, TrellisConfig, TrellisModel, TrellisOutput
from model.trellis.bank_shards import shard_rows
from model.trellis.config import GDN, GLOBAL
from model.trellis.served import ServedTrellis
from tests.support.batches import LockstepRank, Part, Ranks
from tests.unit.trellis.trellis_cases import NANO, make

ODD = replace(
    NANO, d_model=60, vocab_size=101, heads=6, kv_heads=3, head_dim=10, window=5, mlp_dim=50, gdn_heads=3, gdn_key_dim=7,
    gdn_value_dim=11, gdn_conv=3, lora_rank=3, bank_sub_keys=12, bank_value_dim=21, bank_key_dim=9, bank_heads=3, bank_top_k=5,
    rho=("1.0", "0.7", "0.3"), prelude=("global", "gdn"), core=("gdn", "sliding", "gdn", "sliding"), coda=("gdn", "gdn", "global"),
    qk_norm="all", bank_read_norm=True, aux=None, context=96,
)  # fmt: skip
"""Sizes that no kernel likes, layers in another order, two sliding layers."""
CONFIGS = {"nano": NANO, "odd": ODD}
CLOSE = {"rtol": 0, "atol": 1e-4}


def library(config: TrellisConfig = NANO) -> TrellisModel:
    """A model moved off its initial values, whose bank and adapters weigh something."""
    model = make(config)
    with torch.no_grad():
        model.bank.values *= 30
        for adapters in model.specialisation.adapters.values():
            for parameter in adapters.parameters():
                parameter *= 3
    return model


def served(model: TrellisModel, rank: int = 0, world: int = 1, *, kernels: bool = False) -> ServedTrellis:
    """One rank's served model with the library model's values."""
    made = ServedTrellis(model.config, rank=rank, world=world, dtype=torch.float32, device="cpu", kernels=kernels)
    tensors = model.strip_aux_heads()
    made.load_state_dict(tensors | {"bank.values": shard_rows(tensors["bank.values"], rank, world)})
    return made


class SettlingRank(LockstepRank):
    """Says when a model waits for the device."""

    def settle(self) -> None:
        self.launched.append("settle")


class Serving(Ranks):
    """`Ranks` of a library model's values. The order of free blocks is shuffled."""

    def __init__(self, model: TrellisModel, world: int = 1, *, kernels: bool = False) -> None:
        super().__init__(Path(), world, load=lambda path, rank, world: served(model, rank, world, kernels=kernels))
        self.group.ranks = [SettlingRank(self.group, rank, world) for rank in range(world)]

    def step(self, *turns: Turn) -> ForwardOutput:
        """One forward of these turns; rank 0's output."""
        return self.run(self.batch([turn.part for turn in turns], loops=loop_rows(turns)))[0]

    def held(self, slot: int, rank: int = 0) -> dict[str, torch.Tensor]:
        """What a sequence has on a rank: every recurrent state, and every entry of every cache in position order."""
        state, model, length = self.states[rank], self.models[rank], self.lengths[slot]
        found = {f"{each.name} of {each.layer}": state.recurrent(each.layer, each.name)[slot] for each in model.spec().states}
        size = state.block_size
        places = torch.tensor([self.blocks[slot][at // size] * size + at % size for at in range(length)])
        for cache in model.spec().caches:
            for name, tensor in zip("kv", state.kv(cache.layer), strict=True):
                found[f"{name} of {cache.layer}"] = tensor.flatten(0, 1)[places]
        return {name: tensor.clone() for name, tensor in found.items()}


@dataclass
class Turn:
    """A span: its part, and what `LoopRows` says of it."""

    part: Part
    most: int = 1
    thresholds: tuple[float, ...] = ()
    depth: int = 0
    prompt: bool = False


def loop_rows(turns: Sequence[Turn]) -> LoopRows:
    return LoopRows(
        most=tuple(turn.most for turn in turns),
        thresholds=tuple(turn.thresholds for turn in turns),
        depth=tuple(turn.depth for turn in turns),
        prompt=tuple(turn.prompt for turn in turns),
    )


def prompt_turn(slot: int, ids: torch.Tensor, most: int, wanted: Sequence[int] | None = None) -> Turn:
    return Turn(Part(slot, ids.tolist(), wanted), most=most, prompt=True)


def decode_turn(slot: int, token: int, most: int, thresholds: tuple[float, ...] = (), depth: int = 0) -> Turn:
    return Turn(Part(slot, [token]), most=most, thresholds=thresholds, depth=depth)


def plan_of(depth: int, k: int) -> list[torch.Tensor]:
    """The plan of one token that runs `depth` of `k` loops."""
    return [torch.tensor([[depth >= loop]]) for loop in range(2, k + 1)]


def library_depth(out: TrellisOutput, thresholds: tuple[float, ...], most: int) -> int:
    """Where the first exit head of an unplanned step's only row stops it. No head may be near its threshold."""
    chances = out.exit_logits[:, 0, 0].double().sigmoid().tolist()
    assert all(abs(chance - due) > 1e-6 for chance, due in zip(chances, thresholds, strict=False))
    return next((loop for loop, due in enumerate(thresholds, start=1) if chances[loop - 1] >= due), most)


class Reference:
    """The library's run of one sequence: a prompt, then single tokens, each with the depth that it is given or its exits say."""

    def __init__(self, model: TrellisModel, most: int, thresholds: tuple[float, ...] = ()) -> None:
        self.model, self.most, self.thresholds = model, most, thresholds
        self.state: ModelState | None = None

    @torch.no_grad()
    def prompt(self, ids: torch.Tensor) -> TrellisOutput:
        out = self.model(ids, k=self.most, return_state=True)
        self.state = out.state
        return out

    @torch.no_grad()
    def decode(self, token: int, depth: int = 0) -> tuple[torch.Tensor, int]:
        """Logits `[vocab]`, and how many loops ran."""
        free = self.model.step(token, self.state, k=self.most)
        depth = depth or library_depth(free, self.thresholds, self.most)
        out = self.model.step(token, self.state, k=self.most, plan=plan_of(depth, self.most))
        self.state = out.state
        return out.logits[0, 0], depth

    def held(self) -> dict[str, torch.Tensor]:
        """The bundle under the names of `Serving.held`, a ring's entries in position order."""
        return library_held(self.model, self.state)


def library_held(model: TrellisModel, state: ModelState) -> dict[str, torch.Tensor]:
    config, found = model.config, {}
    gdn, rings, caches = iter(state.gdn), iter(state.sliding), iter(state.global_kv)
    places = [(number, 0) for number in range(len(config.prelude))]
    core = range(len(config.prelude), len(config.prelude) + len(config.core))
    places += [(number, loop) for loop in range(1, config.k_max + 1) for number in core]
    places += [(number, 0) for number in range(core.stop, len(config.layers))]
    for number, loop in places:
        kind = config.layers[number]
        if kind == GDN:
            instance, suffix = next(gdn), f".{loop}" if loop else ""
            found |= {f"conv{suffix} of {number}": instance.conv[0].mT, f"h{suffix} of {number}": instance.s[0]}
        elif kind == GLOBAL:
            rows = next(caches).rows(state.position)
            found |= {f"k of {number}": rows.k[0], f"v of {number}": rows.v[0]}
        elif loop == 1:
            ring = next(rings)
            slots = torch.arange(state.position - state.fill(), state.position) % config.window
            found |= {f"k of {number}": ring.k[0, slots], f"v of {number}": ring.v[0, slots]}
    return found


def assert_held(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal within 1e-4; of a sliding layer's entries the window."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name][-len(tensor) :], tensor, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


def assert_all_held(serving: Serving, own: Mapping[int, Reference]) -> None:
    """What each sequence keeps is the library's."""
    for slot, sequence in own.items():
        assert_held(serving.held(slot), sequence.held())


def assert_logits(got: torch.Tensor | None, expected: torch.Tensor) -> None:
    """Within 1e-4, and the same best token."""
    assert got is not None
    torch.testing.assert_close(got, expected, **CLOSE)
    assert got.argmax(-1).tolist() == expected.argmax(-1).tolist()
