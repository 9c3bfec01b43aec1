"""Where the bytes of a piece come from: safetensors files, or a counter.

A source's `read` gives what a piece selects of its tensor, before the piece's transposition, in any floating-point dtype.
"""

from __future__ import annotations

from contextlib import ExitStack
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from model.folder import TensorManifest
from model.loading.geometry import box, read_shape, selected_places, selected_shape
from model.pieces import Piece

DUMMY_RANGE = 1e-3
"""Dummy weights are uniform in plus and minus this."""
SCALE = DUMMY_RANGE / 2**23
_CHUNK = 1 << 22


class Source(Protocol):
    """Gives the tensors that pieces name."""

    def read(self, piece: Piece) -> torch.Tensor:
        """`tensor[piece.source]`"""
        ...


class FileSource:
    """Mapped safetensors files. What `read` gives is a view of the mapping, whose pages belong to the page cache.

    Files are opened at once and closed with the context. Reading from several threads is safe.
    """

    def __init__(self, path: Path, manifest: TensorManifest) -> None:
        self._path = path
        self._manifest = manifest
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}

    def __enter__(self) -> FileSource:
        for file in sorted({info.file for info in self._manifest.values()}):
            self._handles[file] = self._stack.enter_context(safe_open(self._path / file, framework="pt", device="cpu"))
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()
        self._stack.close()

    def read(self, piece: Piece) -> torch.Tensor:
        """`tensor[piece.source]`, in the dtype of the file."""
        handle = self._handles[self._manifest[piece.name].file]
        if piece.source and all(isinstance(part, int) or part.step in (None, 1) for part in piece.source):
            return handle.get_slice(piece.name)[piece.source]
        return handle.get_tensor(piece.name)[piece.source]


class DummySource:
    """Weights from a counter: the value at a position of a tensor follows from (seed, tensor name, position) alone.

    So replicated parameters are alike on all ranks, and an expert or a vocabulary row is the same whichever rank holds it.
    `device` is where the values are computed; integer arithmetic gives every device the same bits.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device

    def read(self, piece: Piece) -> torch.Tensor:
        """float32, uniform in ±DUMMY_RANGE."""
        strides = [prod(piece.shape[dim + 1 :]) for dim in range(len(piece.shape))]
        steps = [(part, stride) for part, stride in zip(box(piece.shape, piece.source), strides, strict=True)]
        shape = selected_shape(piece.shape, piece.source)
        return _uniform(steps, self._key(piece), self._device).reshape(shape)

    def write(self, piece: Piece, target: torch.Tensor) -> bool:
        """On a GPU, the same values straight into the target, rounded once; False where that is not to be had."""
        if not target.is_cuda or target.shape != read_shape(piece):
            return False
        from kernels.uniform_triton import fill_uniform

        start, strides = selected_places(piece)
        with torch.cuda.device(target.device):  # a thread has a device of its own
            return fill_uniform(target, start, strides, self._key(piece), SCALE)

    def _key(self, piece: Piece) -> int:
        return int.from_bytes(blake2b(f"{self._seed}/{piece.name}".encode(), digest_size=8).digest(), "little", signed=True)


def _uniform(dims: list[tuple[range, int]], key: int, device: torch.device) -> torch.Tensor:
    """float32 values at the positions spanned by (indices, stride) of each dimension, row-major; int64 scratch is bounded."""
    split = next((i for i, (indices, _) in enumerate(dims) if len(indices) > 1), len(dims))
    outer = _positions(dims[: split + 1], device)
    inner = _positions(dims[split + 1 :], device)
    values = torch.empty(len(outer), len(inner), dtype=torch.float32, device=device)
    step = max(1, _CHUNK // max(1, len(inner)))
    for start in range(0, len(outer), step):
        place = outer[start : start + step, None] + inner
        # The mixer is that of splitmix64 with arithmetic shifts; the top 24 bits are exact in a float32.
        place = (place + key) * -0x61C8864680B583EB
        place = (place ^ (place >> 30)) * -0x40A7B892E31B1A47
        place = (place ^ (place >> 27)) * -0x6B2FB644ECCEEE15
        values[start : start + step] = (place >> 40).to(torch.float32) * SCALE
    return values


def _positions(dims: list[tuple[range, int]], device: torch.device) -> torch.Tensor:
    """int64, flat: the sums of index times stride over all dimensions, row-major."""
    flat = torch.zeros(1, dtype=torch.int64, device=device)
    for indices, stride in dims:
        part = torch.arange(indices.start, indices.stop, indices.step, dtype=torch.int64, device=device) * stride
        flat = (flat[:, None] + part).flatten()
    return flat
