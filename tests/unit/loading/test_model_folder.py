"""Folders written by safetensors itself, whole and broken: each refusal names the file and the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from model.errors import CheckpointError
from model.folder import INDEX, Fingerprint, fingerprint, open_folder, read_header, read_manifest

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16),
    "c": torch.zeros(0, 5, dtype=torch.float16),
    "d": torch.tensor(7, dtype=torch.int64),
}


def write_sharded(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "x"}')
    save_file({"a": TENSORS["a"], "c": TENSORS["c"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": TENSORS["b"], "d": TENSORS["d"]}, folder / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    write_index(folder, {"a": 1, "b": 2, "c": 1, "d": 2})


def write_index(folder: Path, files: dict[str, int]) -> None:
    weight_map = {name: f"model-0000{number}-of-00002.safetensors" for name, number in files.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_manifest_of_shards_agrees_with_the_library(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    manifest = read_manifest(tmp_path)
    assert list(manifest) == ["a", "b", "c", "d"]
    for name, info in manifest.items():
        with safe_open(tmp_path / info.file, framework="pt") as handle:
            part = handle.get_slice(name)
            assert (info.dtype, list(info.shape)) == (part.get_dtype(), part.get_shape())
        assert info.nbytes == TENSORS[name].nbytes


def test_single_file_of_any_name(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "weights.safetensors")
    assert set(read_manifest(tmp_path)) == set(TENSORS)
    save_file({"z": torch.ones(1)}, tmp_path / "model.safetensors")
    assert set(read_manifest(tmp_path)) == {"z"}


def test_configuration_and_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    folder = open_folder(str(tmp_path))
    assert folder.config == {"model_type": "x"}
    assert folder.generation == {}
    assert folder.tokenizer_files == (tmp_path / "tokenizer.json",)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_folder(tmp_path).generation == {"eos_token_id": [1, 2]}


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1, "a": 2}', "\x80"])
def test_malformed_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_folder(tmp_path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    whole = file.read_bytes()
    assert set(read_header(file)) == set(TENSORS)
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            read_header(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="1 bytes follow"):
        read_header(file)


def test_truncation_names_the_first_tensor_that_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"first": torch.ones(64), "second": torch.ones(64)}, file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated: tensor second"):
        read_header(file)


def write_header(file: Path, header: object, data: bytes) -> None:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "t of shape"),
        ({"t": {"dtype": "F99", "shape": [1], "data_offsets": [0, 8]}}, "F99"),
        ({"t": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "entry t"),
        ({"t": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, "entry t"),
        ({"t": [1]}, "entry t"),
        ({"t": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "t starts at byte 4"),
        (
            {
                "t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "u": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
            },
            "u starts at byte 4",
        ),
        (
            '{"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
            ' "t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
            "t comes twice",
        ),
    ],
)
def test_inconsistent_headers_are_refused(tmp_path: Path, header: object, match: str) -> None:
    write_header(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=match):
        read_manifest(tmp_path)


def test_index_to_a_missing_file(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names model-00002-of-00002\.safetensors, which is not"):
        read_manifest(tmp_path)


def test_index_to_a_missing_tensor(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    write_index(tmp_path, {"a": 1, "b": 2, "c": 1, "d": 2, "gone": 1})
    with pytest.raises(CheckpointError, match="tensor gone into model-00001"):
        read_manifest(tmp_path)
    write_index(tmp_path, {"a": 2, "b": 2, "c": 1, "d": 2})
    with pytest.raises(CheckpointError, match="tensor a into model-00002"):
        read_manifest(tmp_path)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"b": TENSORS["b"], "d": TENSORS["d"], "a": TENSORS["a"]}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor a is in both model-00001-of-00002\.safetensors and model-00002"):
        read_manifest(tmp_path)


def test_tensor_that_the_index_forgets_is_still_seen(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    write_index(tmp_path, {"a": 1, "b": 2, "c": 1})
    assert "d" in read_manifest(tmp_path)


@pytest.mark.parametrize("weight_map", [{}, [], {"a": "../a.safetensors"}, {"a": 3}, {"a": ""}])
def test_malformed_index(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        read_manifest(tmp_path)


def test_shards_without_an_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json"):
        read_manifest(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no safetensors"):
        read_manifest(tmp_path)


def test_fingerprint_follows_content_and_not_sharding(tmp_path: Path) -> None:
    sharded, single, config_only = (tmp_path / name for name in ("sharded", "single", "config"))
    for folder in (sharded, single, config_only):
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "x"}')
    write_sharded(sharded)
    save_file(TENSORS, single / "model.safetensors")
    first = fingerprint(sharded)
    assert fingerprint(single) == first
    assert fingerprint(config_only) == Fingerprint(first.config, "")
    save_file({**TENSORS, "a": torch.ones(3, 2)}, single / "model.safetensors")
    assert fingerprint(single).manifest != first.manifest
    (single / "config.json").write_text('{"model_type": "y"}')
    assert fingerprint(single).config != first.config
