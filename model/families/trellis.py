"""Trellis: a looped hybrid with a memory bank, whose value table is what ranks share out. What it is lies in `model.trellis`."""

from __future__ import annotations

from dataclasses import dataclass

from model.config import FamilyConfig
from model.errors import UnsupportedModel
from model.families.family import Family
from model.families.fields import Json, refuse
from model.families.weights import PlaceOf
from model.layers.build import Build
from model.layers.operators import TorchOperators
from model.parallel import ExpertPlacement, Parallel
from model.pieces import WeightMap
from model.reads import WeightBytes
from model.scratch import StepSize
from model.spec import ModelSpec
from model.trellis.checkpoint import ARCHITECTURE, config_from_json
from model.trellis.config import TrellisConfig
from model.trellis.rank_weights import rank_weights
from model.trellis.reads import one_loop_reads
from model.trellis.scratch import step_bytes
from model.trellis.served import ServedTrellis, trellis_spec
from model.trellis.settings import ModelSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class TrellisFolder(FamilyConfig):
    """A Trellis folder. End tokens are those of its generation_config.json; config.json names none."""

    trellis: TrellisConfig


def configure(config_json: Json, architecture: str) -> TrellisFolder:
    """Read a config.json of layout 1. Raises ModelError naming the field."""
    config = config_from_json(config_json)
    ModelSettings().check(config)
    return TrellisFolder(architecture=architecture, trellis=config)


def weights(place: PlaceOf[TrellisFolder]) -> WeightMap:
    """The whole checkpoint, but of the bank's values every world-th row from the rank's number on."""
    config, parallel = place.config.trellis, place.parallel
    if config.bank_slots % parallel.world:
        supported = f"numbers whose square is a multiple of the {parallel.world} ranks"
        raise refuse("bank_sub_keys", config.bank_sub_keys, supported)
    return rank_weights(config, parallel.rank, parallel.world)


def spec(config: TrellisFolder) -> ModelSpec:
    """See `model.trellis.served.spec`."""
    return trellis_spec(config.trellis, config.eos_token_ids)


def build(config: TrellisFolder, parallel: Parallel, placement: ExpertPlacement, build: Build) -> ServedTrellis:
    """One rank's module, parameters without values. It has kernels of its own where a decoder would have the fused operators."""
    return ServedTrellis(
        config.trellis,
        rank=parallel.rank,
        world=parallel.world,
        dtype=build.dtype,
        device=build.device,
        kernels=not isinstance(build.operators, TorchOperators),
    )


def scratch(config: TrellisFolder, size: StepSize) -> int:
    """See `model.trellis.scratch`."""
    return step_bytes(config.trellis, size)


def reads(config: TrellisFolder, parallel: Parallel, placement: ExpertPlacement, nbytes: int, dtype: str) -> WeightBytes:
    """See `model.trellis.reads`."""
    return one_loop_reads(config.trellis, parallel.rank, parallel.world, dtype)


def split(config: TrellisFolder, ranks: int) -> TrellisFolder:
    """Heads are not divided: what ranks share out is the bank."""
    raise UnsupportedModel(f"attention_layout 'tensor' is not served for {config.architecture}; 'replicated' is")


def own(config: TrellisFolder, ranks: int) -> TrellisFolder:
    """Nor are sequences: each rank needs the rows of all to look up its part of the bank."""
    raise UnsupportedModel(f"attention_layout 'data' is not served for {config.architecture}; 'replicated' is")


FAMILY = Family(
    name="trellis",
    architectures=(ARCHITECTURE,),
    configure=configure,
    spec=spec,
    weights=weights,
    build=build,
    scratch=scratch,
    reads=reads,
    split=split,
    own=own,
)
