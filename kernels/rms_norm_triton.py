"""RMSNorm of rows on the GPU, with the residual addition before it; and the gated unit of dense MLPs.

The same functions as `kernels.rms_norm`, which is the specification, in float32 up to one rounding of the result.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, bind, cdiv, next_power_of_2
from kernels.pairs import Pairs
from kernels.pairs_triton import held_choices, sum_choices

WIDEST = 65536
"""Most elements of a row: a row lives in the registers of one program."""


def norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = False, pdl: bool = False) -> torch.Tensor:
    """RMSNorm of rows x `[T, width]` (rows may be strided) with weight `[width]` -> contiguous `[T, width]` of x's dtype."""
    return _launch(x, None, None, None, weight, eps, zero_centered, pdl)


def add_norm_rows(
    x: torch.Tensor,
    delta: torch.Tensor | Pairs,
    weight: torch.Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`x += delta` in place, rounded to x's dtype, then RMSNorm of x: all `[T, width]`.

    With `shared [T, width]` and `shared_gate [T, 1]`, a shared expert's output and the logit of its gate, x also gains
    `sigmoid(shared_gate) * shared`. Sums are float32, rounded once; those of pairs are rounded before, too.
    """
    if (shared is None) != (shared_gate is None):
        raise ValueError("shared and shared_gate belong together")
    return _launch(x, delta, shared, shared_gate, weight, eps, zero_centered, pdl)


def silu_mul(gate_up: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """`silu(gate) * up` of fused rows `[T, 2 width]`, gates first -> `[T, width]`."""
    rows, twice = gate_up.shape
    width = twice // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(1024, next_power_of_2(width))
        _silu_mul(block, pdl)((rows, cdiv(width, block), 1), gate_up, out, gate_up.stride(0), width)
    return out


def _launch(
    x: torch.Tensor,
    delta: torch.Tensor | Pairs | None,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    zero_centered: bool,
    pdl: bool,
) -> torch.Tensor:
    rows, width = x.shape
    pairs = delta if isinstance(delta, Pairs) else None
    added = delta.value if isinstance(delta, Pairs) else delta
    if width > WIDEST or weight.shape != (width,):
        raise ValueError(f"rows of {width} elements, weight {tuple(weight.shape)}; rows have at most {WIDEST}")
    for other in (delta, shared):
        if other is not None and other.shape != x.shape:
            raise ValueError(f"{tuple(other.shape)} is added to {tuple(x.shape)}")
    if any(other is not None and other.stride(1) != 1 for other in (added, shared)):
        raise ValueError("rows must be contiguous")
    if x.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    top_k = 0 if pairs is None else pairs.top_k
    _norm(next_power_of_2(width), top_k, delta is not None, shared is not None, zero_centered, pdl)(
        (rows, 1, 1),
        x,
        added,
        None if pairs is None else pairs.experts,
        None if pairs is None else pairs.local,
        shared,
        shared_gate,
        weight,
        out,
        x.stride(0),
        0 if added is None else added.stride(0),
        0 if shared is None else shared.stride(0),
        0 if shared_gate is None else shared_gate.stride(0),
        width,
        eps,
    )
    return out


@cache
def _norm(block: int, top_k: int, add: bool, shared: bool, zero_centered: bool, pdl: bool) -> Launch:
    return bind(
        _norm_kernel,
        BLOCK=block,
        TOP_K=top_k,
        ADD=add,
        SHARED=shared,
        ZERO_CENTERED=zero_centered,
        PDL=pdl,
        num_warps=min(16, max(1, block // 512)),
        launch_pdl=pdl,
    )


@cache
def _silu_mul(block: int, pdl: bool) -> Launch:
    return bind(_silu_mul_kernel, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl)


@triton.jit
def _norm_kernel(
    x,
    delta,
    experts,
    local,
    shared,
    shared_gate,
    weight,
    out,
    x_stride,
    delta_stride,
    shared_stride,
    gate_stride,
    width,
    eps,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    ADD: tl.constexpr,
    SHARED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    here = at < width
    factor = tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        factor += 1.0
    if TOP_K:
        held = held_choices(experts, local, row, TOP_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row * x_stride + at, mask=here, other=0.0).to(tl.float32)
    if ADD:
        if TOP_K:
            sums = sum_choices(delta, row, held, delta_stride, at, here, TOP_K)
            value += sums.to(delta.dtype.element_ty).to(tl.float32)
        else:
            value += tl.load(delta + row * delta_stride + at, mask=here, other=0.0).to(tl.float32)
        if SHARED:
            opened = tl.sigmoid(tl.load(shared_gate + row * gate_stride).to(tl.float32))
            value += opened * tl.load(shared + row * shared_stride + at, mask=here, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + row * x_stride + at, rounded, mask=here)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(out + row * width + at, (value * scale * factor).to(out.dtype.element_ty), mask=here)


@triton.jit
def _silu_mul_kernel(gate_up, out, stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_up + row * stride + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=here)
