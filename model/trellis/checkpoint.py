"""A Trellis checkpoint on disk, layout 1.

    config.json          {"architectures": ["TrellisForCausalLM"], "model_type": "trellis", "trellis_layout": 1, ...}: after these
                         every field of `TrellisConfig` under its name; "aux" is an object, or null without auxiliary heads
    model.safetensors    the state dictionary under its own keys: weights (out, in), nothing fused, the tied matrix once, the bank's
                         value table whole, metadata {"format": "pt", "trellis_layout": "1"}; or several files with an index

Dtypes may be any that torch converts to the model's. A layout that changes keys, shapes or meanings gets the next number; a
reader refuses numbers it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from model.errors import CheckpointError
from model.folder import SINGLE, TensorManifest, open_folder, read_manifest
from model.loading.checks import listing
from model.loading.sources import FileSource
from model.pieces import Piece
from model.trellis.bank import WHOLE, Shard
from model.trellis.config import AuxHeadSpec, TrellisConfig
from model.trellis.errors import ModelConfigError
from model.trellis.model import TrellisModel
from model.trellis.serving import AUX_PREFIX
from model.trellis.settings import ModelSettings

LAYOUT = 1
ARCHITECTURE, MODEL_TYPE = "TrellisForCausalLM", "trellis"
_HEAD: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, "trellis_layout": LAYOUT}


def save_checkpoint(model: TrellisModel, folder: Path | str, *, aux: bool = True) -> None:
    """Write config.json and model.safetensors. Without `aux` it is a serving checkpoint: no auxiliary heads, and "aux" null."""
    if model.bank.shard.world > 1:
        raise CheckpointError(f"a checkpoint holds the whole bank; this model has the rows of one rank of {model.bank.shard.world}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config if aux else replace(model.config, aux=None)
    tensors = model.state_dict() if aux else model.strip_aux_heads()
    owned = {key: tensor.detach().to("cpu").contiguous() for key, tensor in tensors.items()}
    partial = folder / f"{SINGLE}.partial"
    save_file(owned, partial, metadata={"format": "pt", "trellis_layout": str(LAYOUT)})
    partial.replace(folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(config_to_json(config), indent=2) + "\n")


def load_checkpoint(
    folder: Path | str,
    settings: ModelSettings | None = None,
    *,
    aux: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    shard: Shard = WHOLE,
) -> TrellisModel:
    """The model of a folder; without `aux` its auxiliary heads are left on disk, with `shard` the other ranks' rows of the bank.

    Raises CheckpointError naming missing, surplus and mis-shaped tensors, tensors that are not finite, and layouts other than 1.
    """
    folder = Path(folder)
    stored = config_from_json(open_folder(folder).config)
    config = stored if aux else replace(stored, aux=None)
    with torch.device("meta"):
        every = TrellisModel(stored).state_dict()
        model = TrellisModel(config, settings, shard=shard)
    manifest = read_manifest(folder)
    check_tensors({key: tuple(tensor.shape) for key, tensor in every.items()}, manifest)
    model = model.to(dtype).to_empty(device=device)
    read = {key: info for key, info in manifest.items() if aux or not key.startswith(AUX_PREFIX)}
    with FileSource(folder, read) as source, torch.no_grad():
        for key, parameter in model.state_dict().items():
            own = (slice(shard.rank, None, shard.world),) if key == "bank.values" else ()
            parameter.copy_(source.read(Piece(name=key, shape=manifest[key].shape, source=own)))
            if not bool(parameter.isfinite().all()):
                raise CheckpointError(f"{folder}: tensor {key} has values that are not finite in {dtype}")
    return model


def check_tensors(expected: Mapping[str, tuple[int, ...]], manifest: TensorManifest) -> None:
    """Raise CheckpointError unless the manifest holds exactly these tensors, in these shapes, as floating-point numbers."""
    missing, surplus = expected.keys() - manifest.keys(), manifest.keys() - expected.keys()
    if missing:
        raise CheckpointError(f"{len(missing)} tensors are missing: {listing(missing)}")
    if surplus:
        raise CheckpointError(f"{len(surplus)} tensors are in the folder that this model does not use: {listing(surplus)}")
    wrong = {
        f"{key} is {list(manifest[key].shape)}, not {list(shape)}"
        for key, shape in expected.items()
        if manifest[key].shape != shape
    }
    if wrong:
        raise CheckpointError(f"{len(wrong)} tensors have another shape than the configuration asks for: {listing(wrong)}")
    strange = {f"{key} is {info.dtype}" for key, info in manifest.items() if info.dtype not in ("F64", "F32", "F16", "BF16")}
    if strange:
        raise CheckpointError(f"{len(strange)} tensors are no floating-point numbers: {listing(strange)}")


def config_to_json(config: TrellisConfig) -> dict[str, Any]:
    """What config.json holds."""
    return _HEAD | asdict(config)


def config_from_json(values: Mapping[str, Any]) -> TrellisConfig:
    """The configuration of a config.json. Raises CheckpointError for another kind or layout and for fields that are not its own."""
    for name, due in _HEAD.items():
        if values.get(name) != due:
            raise CheckpointError(f"config.json: {name} = {values.get(name)!r}; this reads {due!r}")
    given = {name: value for name, value in values.items() if name not in _HEAD}
    known = {field.name for field in fields(TrellisConfig)}
    if given.keys() != known:
        odd = [f"lacks {listing(known - given.keys())}"] * bool(known - given.keys())
        odd += [f"has {listing(given.keys() - known)}"] * bool(given.keys() - known)
        raise CheckpointError(f"config.json {' and '.join(odd)}, which a layout {LAYOUT} configuration {'does not' if odd else ''}")
    try:
        given |= {name: tuple(given[name]) for name in ("rho", "prelude", "core", "coda")}
        given["aux"] = None if given["aux"] is None else AuxHeadSpec(**given["aux"])
        return TrellisConfig(**given)
    except (TypeError, ModelConfigError) as error:
        raise CheckpointError(f"config.json: {error}") from error
