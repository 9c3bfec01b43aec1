"""A module on the meta device becomes one on its device, parameter by parameter, each filled with this rank's pieces.

No parameter is held twice: it is allocated once, on its device, and its pieces are written into it from the source's views. What is
in memory beyond the share is at most the pieces being written, one a thread. Parameters that share memory on the meta device do so
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import nn

from model.errors import CheckpointError, ModelError
from model.loading.checks import check_targets, listing
from model.loading.sources import Source
from model.pieces import Piece, WeightMap

THREADS = 4
"""Pieces written at once: enough to keep a disk's queue and the page faults busy."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a module under all its names (tied parameters share one), laid out as its meta tensor says.

    It begins `offset` elements into memory number `memory`, of `nbytes`, which other tensors may have a part of.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    memory: int
    offset: int
    nbytes: int


def slots_of(module: nn.Module, weight_map: WeightMap) -> dict[str, Slot]:
    """The tensors to fill, by the name under which the map has them: all parameters, and the buffers that have pieces."""
    groups: dict[int, list[str]] = {}
    tensors = {}
    buffers = [pair for pair in module.named_buffers(remove_duplicate=False) if pair[0] in weight_map.pieces]
    for name, tensor in [*module.named_parameters(remove_duplicate=False), *buffers]:
        groups.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    slots = {}
    memories: dict[torch.UntypedStorage, int] = {}
    for key, names in groups.items():
        mapped = [name for name in names if name in weight_map.pieces]
        tensor, storage = tensors[key], tensors[key].untyped_storage()
        slots[(mapped or names)[0]] = Slot(
            names=tuple(names),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=tensor.dtype,
            memory=memories.setdefault(storage, len(memories)),
            offset=int(tensor.storage_offset()),
            nbytes=storage.nbytes(),
        )
    return slots


def weight_bytes(module: nn.Module, weight_map: WeightMap) -> int:
    """Bytes of this rank's weights on the device, from the meta module."""
    return sum({slot.memory: slot.nbytes for slot in slots_of(module, weight_map).values()}.values())


def materialise(
    module: nn.Module,
    weight_map: WeightMap,
    source: Source,
    *,
    device: torch.device,
    threads: int = THREADS,
    fill: Callable[[str, Piece, torch.Tensor], bool] | None = None,
    advance: Callable[[int], object] | None = None,
) -> int:
    """Allocate and fill every parameter of `module`, in the module's order; returns the bytes written.

    `fill(name, piece, target)` may write a piece's target itself and say so with True. `advance` is told the bytes of each piece
    that is written. Raises CheckpointError for a non-finite value, ModelError when the map and the module do not fit each other.
    """
    slots = slots_of(module, weight_map)
    names = {alias: name for name, slot in slots.items() for alias in slot.names}
    pieces = {name: parts for name, parts in weight_map.pieces.items() if names.get(name, name) == name}
    filled = check_targets({name: slot.shape for name, slot in slots.items()}, pieces)

    memories: dict[int, torch.Tensor] = {}

    def jobs() -> Iterator[tuple[str, Piece, torch.Tensor]]:
        for name, slot in slots.items():
            if slot.memory not in memories:
                memories[slot.memory] = torch.empty(slot.nbytes // slot.dtype.itemsize, dtype=slot.dtype, device=device)
            tensor = memories[slot.memory].as_strided(slot.shape, slot.stride, slot.offset)
            if slot.shape and filled[name] < slot.shape[0]:
                tensor[filled[name] :].zero_()
            _assign(module, slot.names, tensor)
            for piece in pieces[name]:
                yield name, piece, tensor[piece.target]

    def write(name: str, piece: Piece, target: torch.Tensor) -> int:
        if fill is None or not fill(name, piece, target):
            write_piece(piece, source, target)
        return target.nbytes

    written = 0
    for nbytes in _run(jobs(), write, threads):
        written += nbytes
        if advance is not None:
            advance(nbytes)
    check_materialised(module)
    return written


def write_piece(piece: Piece, source: Source, target: torch.Tensor) -> None:
    """`target[:] = transpose?(source)`, converted to the target's dtype; refuses values that are not finite afterwards."""
    value = source.read(piece)
    if piece.transpose:
        value = value.mT
    if target.dim() == 2 and target.stride(0) == 1:
        # A weight that memory holds transposed: row by row of the memory is several times faster, for the copy and for the check.
        value, target = value.mT, target.mT
    target.copy_(value)
    if target.numel() and not _finite(target):
        where = "in the checkpoint" if not _finite(value) else f"once converted from {value.dtype} to {target.dtype}"
        raise CheckpointError(f"tensor {piece.name} holds values that are not finite {where}")


def check_materialised(module: nn.Module) -> None:
    """Raise ModelError naming what is still on the meta device."""
    left = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]
    if left:
        raise ModelError(f"{len(left)} tensors of the model have no values: {listing(left)}")


def release(module: nn.Module) -> None:
    """Give back the memory of all parameters and buffers, newest first: each becomes a tensor on the meta device."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names = [name for name, _ in reversed(named)]
    del named
    for name in names:
        owner, attribute = _owner(module, name)
        _assign(module, (name,), torch.empty_like(getattr(owner, attribute), device="meta"))


def _finite(tensor: torch.Tensor) -> bool:
    """No NaN and no infinity, in one pass without a temporary of the tensor's size."""
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that holds a dotted name, and its last part."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _assign(module: nn.Module, names: tuple[str, ...], tensor: torch.Tensor) -> None:
    """Put one tensor in place of what each name holds, as a parameter where that is one."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    for name in names:
        owner, attribute = _owner(module, name)
        setattr(owner, attribute, parameter if isinstance(getattr(owner, attribute), nn.Parameter) else tensor)


def _run(
    jobs: Iterator[tuple[str, Piece, torch.Tensor]], write: Callable[[str, Piece, torch.Tensor], int], threads: int
) -> Iterator[int]:
    """Run `write` over the jobs, at most `threads` in flight. An error is raised when all of them have stopped."""
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="load") as pool:
        flying: list[Future[int]] = []
        for job in jobs:
            if len(flying) >= threads:
                wait(flying, return_when=FIRST_COMPLETED)
            ready = [future for future in flying if future.done()]
            flying = [future for future in flying if not future.done()]
            for future in ready:
                yield future.result()
            flying.append(pool.submit(write, *job))
        for future in flying:
            yield future.result()
