"""What a failed forward held is gone before the next command, although its error is still known."""

from __future__ import annotations

import weakref

import pytest
import torch

from ep_runtime.engine.out_of_memory import let_go
from protocol.ack import ErrorCode, error_code


class Tensor(torch.Tensor):
    """One that can be watched."""


def forward(seen: list[weakref.ref[Tensor]]) -> None:
    activation = Tensor(1000)
    seen.append(weakref.ref(activation))
    layer(activation, seen)


def layer(x: torch.Tensor, seen: list[weakref.ref[Tensor]]) -> None:
    inner = Tensor(1000)
    seen.append(weakref.ref(inner))
    torch.empty(1 << 60, dtype=torch.uint8)


def test_the_tensors_of_a_failed_forward_are_let_go() -> None:
    seen: list[weakref.ref[Tensor]] = []
    caught: Exception | None = None
    try:
        forward(seen)
    except RuntimeError as error:
        caught = error
    assert caught is not None
    assert [ref() is None for ref in seen] == [False, False]
    let_go(caught)
    assert [ref() is None for ref in seen] == [True, True]
    assert "memory" in str(caught)


def test_what_the_allocators_raise_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert error_code(refused.value) is ErrorCode.OUT_OF_MEMORY
    with pytest.raises(MemoryError) as refused_bytes:
        bytearray(1 << 60)
    assert error_code(refused_bytes.value) is ErrorCode.OUT_OF_MEMORY
    assert error_code(RuntimeError("std::bad_alloc")) is ErrorCode.OUT_OF_MEMORY
    assert error_code(torch.OutOfMemoryError("CUDA out of memory")) is ErrorCode.OUT_OF_MEMORY
