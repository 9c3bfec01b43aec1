"""What is left of a failed command, given back before the next one."""

from __future__ import annotations

import traceback

import torch

from protocol.ack import ErrorCode, error_code


def let_go(error: Exception) -> None:
    """Drop what the frames of `error`'s traceback hold: a failed forward's tensors would otherwise live as long as the error does.

    When memory ran out on a GPU, what the allocator keeps for itself goes back to the device too: libraries that allocate beside
    it (NCCL, cuBLAS, captured graphs) cannot take it from there.
    """
    traceback.clear_frames(error.__traceback__)
    if error_code(error) is ErrorCode.OUT_OF_MEMORY and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
