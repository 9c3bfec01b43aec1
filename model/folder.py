"""A model folder on disk: its configuration files, and what its safetensors files hold, from their headers alone. No torch.

File format: u64 header length (little-endian), a JSON header `{name: {dtype, shape, data_offsets}}`, then the tensors' bytes
without gaps. Source: the safetensors format description. The index file maps names to files: `{"weight_map": {name: file}}`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from model.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
PROCESSORS_FILE = "processor_config.json"
PROCESSOR_FILES = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}
"""A processor's part of `PROCESSORS_FILE`, where newer folders have its settings -> its own file."""
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Bits of one element, by safetensors dtype name."""
_MAX_HEADER = 100_000_000
_Natural = Annotated[int, msgspec.Meta(ge=0)]


class TensorInfo(NamedTuple):
    """Where a tensor lies and what it is: `file` in the folder, `dtype` as safetensors names it, `offset` from the data's start."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Entry(msgspec.Struct, frozen=True):
    """A tensor's entry in a header, as JSON has it."""

    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


TensorManifest = dict[str, TensorInfo]
"""Tensor name -> TensorInfo, for all files of a folder."""


class Fingerprint(NamedTuple):
    """Hex digests for the handshake. `manifest` is empty where a folder holds no weights."""

    config: str
    manifest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """What a folder says of its model, weights aside. `generation` is empty without a generation_config.json.

    `processors` are the settings of its `image_processor` and its `video_processor`, each with the file that has them.
    """

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    tokenizer_files: tuple[Path, ...]
    processors: dict[str, tuple[str, dict[str, Any]]]


def open_folder(path: Path | str) -> ModelFolder:
    """Read config.json and generation_config.json and find the tokenizer's files. Raises CheckpointError without a config.json."""
    path = Path(path)
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: no config.json in this folder")
    generation = path / "generation_config.json"
    return ModelFolder(
        path=path,
        config=_read_json(path / "config.json"),
        generation=_read_json(generation) if generation.is_file() else {},
        tokenizer_files=tuple(path / name for name in TOKENIZER_FILES if (path / name).is_file()),
        processors=_processors(path),
    )


def has_weights(path: Path | str) -> bool:
    """True when the folder holds safetensors, whole or not."""
    return any(Path(path).glob("*.safetensors")) or (Path(path) / INDEX).is_file()


def read_manifest(path: Path | str) -> TensorManifest:
    """All tensors of the folder's safetensors files, in name order, without reading data.

    Raises CheckpointError, naming file and tensor, for truncated or inconsistent files, for an index that points to a file or
    tensor that is not there, and for a tensor that two files hold.
    """
    path = Path(path)
    index = _read_index(path) if (path / INDEX).is_file() else None
    files = sorted(set(index.values())) if index is not None else [_single_file(path)]
    manifest: TensorManifest = {}
    for file in files:
        if not (path / file).is_file():
            raise CheckpointError(f"{path / INDEX}: names {file}, which is not in the folder")
        for name, info in read_header(path / file).items():
            if name in manifest:
                raise CheckpointError(f"{path}: tensor {name} is in both {manifest[name].file} and {file}")
            manifest[name] = info
    for name, file in (index or {}).items():
        if name not in manifest or manifest[name].file != file:
            raise CheckpointError(f"{path / INDEX}: puts tensor {name} into {file}, which does not hold it")
    return dict(sorted(manifest.items()))


def read_header(file: Path) -> TensorManifest:
    """The tensors of one safetensors file, checked against its size: entries must fill the data part without gap or overlap."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(f"{file}: truncated or no safetensors file ({size} bytes, a header of {length} announced)")
        header = _parse_json(stream.read(length), file)
    header.pop("__metadata__", None)
    tensors = {name: _tensor_info(file, name, entry) for name, entry in header.items()}
    end = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != end:
            raise CheckpointError(f"{file}: tensor {name} starts at byte {info.offset} of the data, where {end} is due")
        end += info.nbytes
        if 8 + length + end > size:
            raise CheckpointError(f"{file}: truncated: tensor {name} ends at byte {8 + length + end}, the file at {size}")
    if 8 + length + end != size:
        raise CheckpointError(f"{file}: {size - 8 - length - end} bytes follow the last tensor")
    return tensors


def fingerprint(path: Path | str) -> Fingerprint:
    """blake2b of config.json, and of every tensor's name, dtype and shape (how they are spread over files does not matter)."""
    path = Path(path)
    config = blake2b((path / "config.json").read_bytes(), digest_size=16).hexdigest()
    if not has_weights(path):
        return Fingerprint(config, "")
    lines = json.dumps([[name, info.dtype, info.shape] for name, info in read_manifest(path).items()])
    return Fingerprint(config, blake2b(lines.encode(), digest_size=16).hexdigest())


def _single_file(path: Path) -> str:
    """The folder's only safetensors file, when there is no index."""
    found = sorted(file.name for file in path.glob("*.safetensors"))
    if SINGLE in found:
        return SINGLE
    if len(found) == 1 and "-of-" not in found[0]:
        return found[0]
    if found:
        raise CheckpointError(f"{path}: holds {', '.join(found[:8])}, but no {INDEX}")
    raise CheckpointError(f"{path}: no safetensors files in this folder")


def _read_index(path: Path) -> dict[str, str]:
    """The weight map of the index, its file names checked to lie in the folder."""
    weight_map = _read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX}: has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise CheckpointError(f"{path / INDEX}: tensor {name} is in {file!r}, which is not a file name")
    return weight_map


def _tensor_info(file: Path, name: str, entry: object) -> TensorInfo:
    """One entry of a header, its size checked."""
    try:
        said = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{file}: the header's entry {name} is malformed: {error}") from error
    if said.dtype not in DTYPE_BITS:
        raise CheckpointError(f"{file}: tensor {name} is of an unknown dtype, {said.dtype}")
    start, stop = said.data_offsets
    if (stop - start) * 8 != prod(said.shape) * DTYPE_BITS[said.dtype]:
        raise CheckpointError(f"{file}: tensor {name} of shape {said.shape} and dtype {said.dtype} has {stop - start} bytes")
    return TensorInfo(file.name, said.dtype, said.shape, start, stop - start)


def _processors(path: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Settings of processors, looked for as transformers does: in the file of both, else in their own."""
    both = _read_json(path / PROCESSORS_FILE) if (path / PROCESSORS_FILE).is_file() else {}
    found = {}
    for part, name in PROCESSOR_FILES.items():
        if isinstance(both.get(part), dict):
            found[part] = (PROCESSORS_FILE, both[part])
        elif (path / name).is_file():
            found[part] = (name, _read_json(path / name))
    return found


def _read_json(file: Path) -> dict[str, Any]:
    return _parse_json(file.read_bytes(), file)


def _parse_json(data: bytes, file: Path) -> dict[str, Any]:
    """A JSON object in which no key comes twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise CheckpointError(f"{file}: {key} comes twice")
            result[key] = value
        return result

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return value
