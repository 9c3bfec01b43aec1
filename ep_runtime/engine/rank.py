"""One rank's engine before and between epochs: its device, its weights and what it can hold."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from ep_runtime.config import RuntimeConfig
from ep_runtime.engine.ahead.start import compiling, job_for
from ep_runtime.engine.footprint import image_cache_bytes, image_tokens, memory_needs
from ep_runtime.engine.layout import Layout, Machine, choose_layout
from ep_runtime.engine.resident import Resident
from ep_runtime.engine.vision.cache import EncodedImages
from kernels.tuning import Tuning, TuningTable, load_table
from model.errors import UnsupportedModel
from model.families.registry import resolve
from model.folder import Fingerprint as FolderFingerprint
from model.folder import ModelFolder, fingerprint, has_weights, open_folder, read_manifest
from model.layers.operators import Operators, TorchOperators
from model.loader import AttentionLayout, LoadedModel, PreparedModel, prepare_model
from model.memory import DEFAULT_SLOTS, MemoryPlan, device_memory, plan_memory
from model.parallel import Parallel
from model.spec import ModelSpec

log = logging.getLogger(__name__)

STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Dtypes of safetensors files."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankModel:
    """A loaded rank: everything that outlives an epoch.

    `max_image_tokens` are the rows of images that all slots hold at most, 0 for a model without vision. Encoded `images` are the
    head's, and nobody's in a model without vision. `layout` is the attention's, with "auto" decided; sequences are divided among
    `owners` ranks, 1 where each rank keeps what all of them leave. `compile_seconds` were waited for kernels behind the weights.
    """

    config: RuntimeConfig
    parallel: Parallel
    device: torch.device
    dtype: torch.dtype
    loaded: LoadedModel
    plan: MemoryPlan
    max_model_len: int
    folder: FolderFingerprint
    layout: str = "replicated"
    owners: int = 1
    tuning: str = ""
    compile_seconds: float = 0.0
    max_image_tokens: int = 0
    images: EncodedImages | None = None
    resident: Resident = field(default_factory=Resident)

    @property
    def spec(self) -> ModelSpec:
        """The model's spec."""
        return self.loaded.spec


def load_rank(
    config: RuntimeConfig, parallel: Parallel, device: torch.device, *, local_ranks: int, ahead: bool = True
) -> RankModel:
    """Plan memory, print the plan, then read this rank's weights, and compile a GPU's kernels meanwhile, if `ahead`.

    Raises:
        ModelError: the folder is not served, a tensor is at fault, or the plan does not fit; nothing has been read for the last.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = Path(config.model)
    opened = open_folder(folder)
    dtype = choose_dtype(config.dtype, opened.config, stored_dtype(folder) if config.load_format == "auto" else None)
    layout = attention_layout(config, opened, parallel.world, device, dtype)
    if parallel.rank == 0:
        log.info("attention layout %s: %s", layout.name, layout.reason)
    table = tuning_table(config.forward_mode, device)
    prepared = prepare_model(
        folder,
        parallel,
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        seed=config.seed,
        operators=choose_operators(table, device),
        attention_layout=cast("AttentionLayout", layout.name),
    )
    max_model_len = config.max_model_len or prepared.spec.max_positions
    if max_model_len > prepared.spec.max_positions:
        raise UnsupportedModel(f"max_model_len is {max_model_len}; this model has {prepared.spec.max_positions} positions")
    if config.max_loops > prepared.spec.max_loops:
        most = prepared.spec.max_loops
        allowed = f"runs 1 to {most} loops" if most > 1 else "is not looped"
        raise UnsupportedModel(f"max_loops is {config.max_loops}; this model {allowed}")
    owners = parallel.world if layout.name == "data" else 1
    needs = memory_needs(config, prepared, dtype, max_model_len, owners=owners)
    plan = plan_memory(prepared.spec, needs, device_memory(device, local_ranks), config.gpu_memory_utilization)
    log.info("memory plan of rank %d on %s:\n%s", parallel.rank, device, plan.table())
    job = job_for(config, prepared, needs, plan, layout.name, local_ranks) if ahead else None
    with compiling(job) as load_kernels:
        loaded = prepared.load()
        began = time.monotonic()
        kernels = load_kernels()
        waited = time.monotonic() - began
    log.info("rank %d: weights in %.1f s, %d kernels %.1f s later", parallel.rank, loaded.report.seconds, kernels, waited)
    return RankModel(
        config=config,
        parallel=parallel,
        device=device,
        dtype=dtype,
        loaded=loaded,
        plan=plan,
        max_model_len=max_model_len,
        folder=fingerprint(folder),
        layout=layout.name,
        owners=owners,
        tuning="" if table is None else table.digest,
        compile_seconds=waited,
        max_image_tokens=image_tokens(config, prepared.spec, max_model_len),
        images=_image_cache(config, prepared, dtype, max_model_len),
    )


def _image_cache(config: RuntimeConfig, prepared: PreparedModel, dtype: torch.dtype, max_model_len: int) -> EncodedImages | None:
    vision = prepared.spec.vision
    if vision is None or prepared.parallel.rank != 0:
        return None
    row_bytes = vision.row_width * dtype.itemsize
    return EncodedImages(image_cache_bytes(config, image_tokens(config, prepared.spec, max_model_len), row_bytes), row_bytes)


def tuning_table(forward_mode: str | None, device: torch.device) -> TuningTable | None:
    """The configurations of the device's kernels, as its file is now; None on a CPU and for the mode `reference`."""
    if device.type != "cuda" or forward_mode == "reference":
        return None
    return load_table(torch.cuda.get_device_name(device))


def choose_operators(table: TuningTable | None, device: torch.device) -> Operators:
    """GPU kernels, or torch's without a table for them."""
    if table is None:
        return TorchOperators()
    from model.layers.fused import FusedOperators

    return FusedOperators(device, Tuning(table, log.warning))


def attention_layout(config: RuntimeConfig, folder: ModelFolder, world: int, device: torch.device, dtype: torch.dtype) -> Layout:
    """The layout that every rank of such devices comes to."""
    machine = Machine(
        world=world,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        one_host=config.coordinator_host is None,
        dtype=str(dtype).removeprefix("torch."),
        max_num_seqs=config.max_num_seqs or DEFAULT_SLOTS,
        max_model_len=config.max_model_len,
    )
    return choose_layout(config.attention_layout, resolve(folder.config, folder.generation, folder.processors), machine)


def stored_dtype(folder: Path) -> str | None:
    """The dtype that all tensors of a folder have, by torch's name; None for a mixture, for others, and without tensors."""
    if not has_weights(folder):
        return None
    found = {info.dtype for info in read_manifest(folder).values()}
    return STORED.get(found.pop()) if len(found) == 1 else None


def choose_dtype(asked: str, config_json: dict, stored: str | None = None) -> torch.dtype:
    """The dtype of weights and activations: what was asked, or for "auto" the checkpoint's.

    That is what config.json says, the dtype in which tensors are `stored` where it says nothing, else float32.
    """
    if asked != "auto":
        return DTYPES[asked]
    text = config_json.get("text_config", config_json)
    named = str(text.get("dtype") or text.get("torch_dtype") or config_json.get("dtype") or stored or "float32")
    return DTYPES[named.removeprefix("torch.")]
