"""From a model folder to a model on its device, holding this rank's share.

`prepare_model` reads configuration and headers alone, so that the memory plan can be made and refused before any weight is read;
`PreparedModel.load` reads the weights.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from model.config import FamilyConfig
from model.decoder import Decoder
from model.families import registry
from model.families.family import RankModule
from model.folder import ModelFolder, TensorManifest, open_folder, read_manifest
from model.formats import refuse_quantised
from model.layers.operators import Operators
from model.loading.checks import check_manifest
from model.loading.dummy import fill_norms
from model.loading.materialise import THREADS, materialise, release, weight_bytes
from model.loading.sources import DummySource, FileSource
from model.parallel import ExpertPlacement, Parallel
from model.pieces import Piece, WeightMap
from model.scratch import StepSize
from model.spec import ModelSpec
from model.vision.tower import VisionTower

LoadFormat = Literal["auto", "dummy"]
AttentionLayout = Literal["replicated", "tensor", "data"]
Progress = bool | Literal["always"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading did: bytes of weights on the device, seconds, and where they came from."""

    load_format: LoadFormat
    nbytes: int
    seconds: float


@dataclass(kw_only=True, slots=True)
class LoadedModel:
    """A model on its device. `close` gives its memory back; the module cannot run afterwards."""

    model: RankModule
    spec: ModelSpec
    config: FamilyConfig
    placement: ExpertPlacement
    report: LoadReport

    @property
    def tower(self) -> VisionTower | None:
        """What encodes images, on the head of a model that takes them."""
        return self.model.tower if isinstance(self.model, Decoder) else None

    def close(self) -> None:
        """Drop all weights, newest first. The memory returns once no view of them is left elsewhere."""
        release(self.model)


@dataclass(kw_only=True, slots=True)
class PreparedModel:
    """A model of which nothing is read yet: its module is on the meta device. `manifest` is None for dummy weights."""

    folder: ModelFolder
    parallel: Parallel
    device: torch.device
    module: RankModule
    weight_map: WeightMap
    manifest: TensorManifest | None
    spec: ModelSpec
    config: FamilyConfig
    placement: ExpertPlacement
    seed: int

    @property
    def weight_bytes(self) -> int:
        """Bytes that this rank's weights will take on the device."""
        return weight_bytes(self.module, self.weight_map)

    def step_bytes(self, size: StepSize) -> int:
        """An upper bound on this model's temporaries of a step."""
        return registry.family_of(self.config.architecture).scratch(self.config, size)

    def load(self, progress: Progress = True) -> LoadedModel:
        """Fill the module. Raises CheckpointError for a non-finite value. The progress bar is rank 0's, on stderr.

        `progress` shows it when stderr is a terminal; "always" shows it anyway.
        """
        started = time.perf_counter()
        shown = self.parallel.rank == 0 and (progress == "always" or (progress and sys.stderr.isatty()))
        with tqdm(total=self.weight_bytes, unit="B", unit_scale=True, desc="loading weights", disable=not shown) as bar:
            nbytes = self._fill(bar.update)
        report = LoadReport("dummy" if self.manifest is None else "auto", nbytes, time.perf_counter() - started)
        return LoadedModel(model=self.module, spec=self.spec, config=self.config, placement=self.placement, report=report)

    def _fill(self, advance: Callable[[int], object]) -> int:
        if self.manifest is None:
            source = DummySource(self.seed, self.device)
            norms = fill_norms(self.module, self.weight_map.neutral)

            def fill(name: str, piece: Piece, target: torch.Tensor) -> bool:
                return norms(name, piece, target) or source.write(piece, target)

            return materialise(self.module, self.weight_map, source, device=self.device, threads=1, fill=fill, advance=advance)
        with FileSource(self.folder.path, self.manifest) as files:
            return materialise(self.module, self.weight_map, files, device=self.device, threads=THREADS, advance=advance)


def prepare_model(
    folder: Path | str,
    parallel: Parallel,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    operators: Operators | None = None,
    attention_layout: AttentionLayout = "replicated",
) -> PreparedModel:
    """Resolve the configuration, build the module on the meta device and check the files' headers against its weight map.

    Raises UnsupportedModel for an architecture or option that is not served, CheckpointError for tensors that are missing,
    surplus or mis-shaped and for truncated files. `seed` is for dummy weights, which need no more than a config.json. With
    the layout "tensor" this rank has its part of the heads; UnsupportedModel names sizes that do not divide. With "data" it has
    all heads, for the rows of its own sequences.
    """
    device = torch.device(device)
    opened = open_folder(folder)
    refuse_quantised(opened.config)
    config = registry.resolve(opened.config, opened.generation, opened.processors)
    if attention_layout == "tensor":
        config = registry.family_of(config.architecture).split(config, parallel.world)
    elif attention_layout == "data":
        config = registry.family_of(config.architecture).own(config, parallel.world)
    spec = registry.spec_of(config)
    placement = ExpertPlacement.build(spec.num_experts, parallel.world)
    manifest = read_manifest(opened.path) if load_format == "auto" else None
    shapes = {name: info.shape for name, info in (manifest or {}).items()}
    weight_map = registry.weight_map(config, placement, parallel, shapes)
    if manifest is not None:
        check_manifest(weight_map, manifest)
    # The memory layout is that of the device where the weights will lie, not of the meta device.
    row_major = device.type != "cpu"
    module = registry.build_model(config, parallel, placement, dtype=dtype, device="meta", row_major=row_major, operators=operators)
    return PreparedModel(
        folder=opened,
        parallel=parallel,
        device=device,
        module=module,
        weight_map=weight_map,
        manifest=manifest,
        spec=spec,
        config=config,
        placement=placement,
        seed=seed,
    )


def load_model(
    folder: Path | str,
    parallel: Parallel,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress = True,
    attention_layout: AttentionLayout = "replicated",
) -> LoadedModel:
    """Prepare and load in one call, where no memory plan is wanted in between."""
    prepared = prepare_model(
        folder, parallel, dtype=dtype, device=device, load_format=load_format, seed=seed, attention_layout=attention_layout
    )
    return prepared.load(progress)
