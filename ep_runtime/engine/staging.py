"""Host arrays to the device in one copy, and device tensors to the host without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGN = 16
_DTYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
}


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The same arrays (uint8, int32, int64, float32 or float64) on the device, through one pinned buffer and one asynchronous copy.

    torch's pinned allocator keeps the buffer until the copy is done.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // _ALIGN) * _ALIGN
    host = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    view = host.numpy()
    for array, start in zip(arrays, starts, strict=True):
        view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = host.to(device, non_blocking=True)
    return [
        moved[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def download(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in pinned host memory, by an asynchronous copy: valid after an event recorded behind this call. CPU: itself."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
