"""What a family is: the functions that take a folder's configuration to a model, each knowing the configuration's own type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias

from model.decoder import Decoder
from model.families.fields import Json
from model.families.weights import C, PlaceOf
from model.layers.build import Build
from model.parallel import ExpertPlacement, Parallel
from model.pieces import WeightMap
from model.reads import WeightBytes
from model.scratch import StepSize
from model.spec import ModelSpec
from model.trellis.served import ServedTrellis

RankModule: TypeAlias = Decoder | ServedTrellis
"""The classes that families build: each is a `model.base.Model`, and a module whose parameters the loader fills."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family(Generic[C]):
    """A group of architectures that one module describes.

    `configure(config_json, architecture)` reads a configuration or refuses it. Of that, `spec` tells the rest of the runtime what
    it may know, `weights` which tensors a rank reads, `build` makes the rank's module without values, `scratch` bounds the
    temporaries of a step in bytes, and `reads` counts what a decode step reads of `nbytes` of weights in a dtype. `split` gives the
    configuration of a model whose heads are divided among so many ranks, or refuses it; `own` that of one whose sequences are.
    """

    name: str
    architectures: tuple[str, ...]
    configure: Callable[[Json, str], C]
    spec: Callable[[C], ModelSpec]
    weights: Callable[[PlaceOf[C]], WeightMap]
    build: Callable[[C, Parallel, ExpertPlacement, Build], RankModule]
    scratch: Callable[[C, StepSize], int]
    reads: Callable[[C, Parallel, ExpertPlacement, int, str], WeightBytes]
    split: Callable[[C, int], C]
    own: Callable[[C, int], C]
