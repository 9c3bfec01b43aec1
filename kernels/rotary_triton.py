"""Everything between the fused projection of an attention layer and its attention, on the GPU, in one kernel.

Norms of query and key heads, rotary embedding and the write into the paged cache: the same functions as `kernels.rms_norm`,
`kernels.rotary` and `kernels.paged_attention.write_kv`, which are the specification, in float32 up to one rounding of the results.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, bind, cdiv, next_power_of_2


def rotary_cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, scale: float, parts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 cosines and sines `[T, rotary_dim / 2]` times `scale`, once a forward for all its layers.
     positions `[T]`, or `[3, T]` with `parts [rotary_dim / 2]`, the part that each frequency follows; inv_freq `[rotary_dim / 2]`
    float32.
    """
    rows, half = positions.shape[-1], inv_freq.shape[0]
    if positions.dim() == 2 and parts is None:
        raise ValueError("positions of several parts need the part of each frequency")
    cos, sin = torch.empty(2, rows, half, dtype=torch.float32, device=positions.device)
    if rows:
        _tables_kernel[(rows,)](
            positions,
            inv_freq,
            parts if positions.dim() == 2 else None,
            cos,
            sin,
            rows,
            half,
            scale,
            HALF_POW2=next_power_of_2(half),
            THREE=positions.dim() == 2,
            num_warps=1,
        )
    return cos, sin


def row_places(kv_places: torch.Tensor, written_rows: torch.Tensor | None, rows: int) -> torch.Tensor:
    """`[T]` int64: where each row's keys and values go, -1 for a row that is not written; once a forward."""
    if written_rows is None:
        return kv_places
    return torch.full((rows,), -1, dtype=torch.int64, device=kv_places.device).index_copy_(0, written_rows, kv_places)


def attention_inputs(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    places: torch.Tensor,
    *,
    heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    zero_centered: bool = False,
    block_heads: int | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Queries `[T, heads, head_dim]` of qkv `[T, >= (heads + 2 kv_heads) head_dim]` (queries, keys, values, whatever follows).

    Keys and values go to `places [T]` of caches `[N, P, kv_heads, head_dim]`; a row with a negative place writes none. cos, sin
    `[T, rotary_dim / 2]` float32. `q_norm` and `k_norm` `[head_dim]`: RMSNorm over each head before the rotation.
    """
    rows = qkv.shape[0]
    kv_heads, head_dim = k_cache.shape[2:]
    half = cos.shape[1]
    rest = head_dim - 2 * half
    if (q_norm is None) != (k_norm is None):
        raise ValueError("queries and keys are normalised both or not at all")
    if qkv.stride(1) != 1 or qkv.shape[1] < (heads + 2 * kv_heads) * head_dim or rest < 0:
        raise ValueError(f"rows {tuple(qkv.shape)} for {heads} + 2 * {kv_heads} heads of {head_dim}, {2 * half} of them turned")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("caches and tables must be contiguous")
    q = torch.empty(rows, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if rows == 0:
        return q
    block = block_heads or (4 if rows <= 256 else max(16, head_dim // 8))
    parts = cdiv(rows * heads, block) + 2 * cdiv(rows * kv_heads, block)
    _inputs(heads, kv_heads, head_dim, half, block, q_norm is not None, zero_centered, pdl)(
        (parts, 1, 1),
        qkv,
        cos,
        sin,
        q_norm,
        k_norm,
        places,
        q,
        k_cache,
        v_cache,
        rows,
        qkv.stride(0),
        eps,
    )
    return q


@cache
def _inputs(heads: int, kv_heads: int, head_dim: int, half: int, block: int, norm: bool, zero_centered: bool, pdl: bool) -> Launch:
    rest = head_dim - 2 * half
    return bind(
        _inputs_kernel,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HALF_POW2=next_power_of_2(half),
        REST=rest,
        REST_POW2=next_power_of_2(max(rest, 1)),
        HEAD_POW2=next_power_of_2(head_dim),
        BLOCK=block,
        NORM=norm,
        ZERO_CENTERED=zero_centered,
        PDL=pdl,
        num_warps=max(1, min(4, block * head_dim // 512)),
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["rows"])
def _tables_kernel(positions, inv_freq, parts, cos, sin, rows, half, scale, HALF_POW2: tl.constexpr, THREE: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, HALF_POW2)
    here = at < half
    if THREE:
        part = tl.load(parts + at, mask=here, other=0)
        position = tl.load(positions + part * rows + row, mask=here, other=0).to(tl.float32)
        angle = position * tl.load(inv_freq + at, mask=here, other=0.0)
    else:
        angle = tl.load(positions + row).to(tl.float32) * tl.load(inv_freq + at, mask=here, other=0.0)
    to = row.to(tl.int64) * half + at
    tl.store(cos + to, tl.cos(angle) * scale, mask=here)
    tl.store(sin + to, tl.sin(angle) * scale, mask=here)


@triton.jit
def _heads_of(source, target, places, rows, first, stride, COUNT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK heads from `first` on, COUNT a row: where they are, where they go, their rows, and whether they go there.

    `places` has each row's place, negative for none; without it a row goes to its own number.
    """
    head = first + tl.arange(0, BLOCK)
    row = head // COUNT
    live = head < rows * COUNT
    member = (head - row * COUNT) * HEAD_DIM
    if places is None:
        place = row.to(tl.int64)
    else:
        place = tl.load(places + row, mask=live, other=-1).to(tl.int64)
    to = target + place * (COUNT * HEAD_DIM) + member
    return (source + row.to(tl.int64) * stride + member)[:, None], to[:, None], row[:, None], (live & (place >= 0))[:, None]


@triton.jit
def _turn_heads(
    source,
    target,
    row,
    live,
    weight,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_POW2: tl.constexpr,
    REST: tl.constexpr,
    REST_POW2: tl.constexpr,
    eps,
    NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """Heads `[N, 1]` from their places to others: three tiles, the halves that turn and what does not."""
    at, behind = tl.arange(0, HALF_POW2)[None, :], tl.arange(0, REST_POW2)[None, :]
    turns, stays = live & (at < HALF), live & (behind < REST)
    x = tl.load(source + at, mask=turns, other=0.0).to(tl.float32)
    y = tl.load(source + HALF + at, mask=turns, other=0.0).to(tl.float32)
    if REST > 0:
        rest = tl.load(source + 2 * HALF + behind, mask=stays, other=0.0).to(tl.float32)
    angle = row.to(tl.int64) * HALF + at
    c = tl.load(cos + angle, mask=turns, other=0.0)
    s = tl.load(sin + angle, mask=turns, other=0.0)
    if NORM:
        squares = tl.sum(x * x + y * y, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        plus: tl.constexpr = 1.0 if ZERO_CENTERED else 0.0
        x *= scale * (tl.load(weight + at, mask=at < HALF, other=0.0).to(tl.float32) + plus)
        y *= scale * (tl.load(weight + HALF + at, mask=at < HALF, other=0.0).to(tl.float32) + plus)
        if REST > 0:
            rest *= scale * (tl.load(weight + 2 * HALF + behind, mask=behind < REST, other=0.0).to(tl.float32) + plus)
    dtype: tl.constexpr = target.dtype.scalar.element_ty
    tl.store(target + at, (x * c - y * s).to(dtype), mask=turns)
    tl.store(target + HALF + at, (y * c + x * s).to(dtype), mask=turns)
    if REST > 0:
        tl.store(target + 2 * HALF + behind, rest.to(dtype), mask=stays)


@triton.jit(do_not_specialize=["rows"])
def _inputs_kernel(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    places,
    q,
    k_cache,
    v_cache,
    rows,
    qkv_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_POW2: tl.constexpr,
    REST: tl.constexpr,
    REST_POW2: tl.constexpr,
    HEAD_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes BLOCK heads that follow each other, of as many rows as they fill: all queries', then keys', then values'."""
    q_parts = tl.cdiv(rows * HEADS, BLOCK)
    kv_parts = tl.cdiv(rows * KV_HEADS, BLOCK)
    part = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if part < q_parts:
        source, target, row, live = _heads_of(qkv, q, None, rows, part * BLOCK, qkv_stride, HEADS, HEAD_DIM, BLOCK)
        _turn_heads(
            source, target, row, live, q_norm, cos, sin, HEAD_DIM, HALF, HALF_POW2, REST, REST_POW2, eps, NORM, ZERO_CENTERED
        )  # fmt: skip
    elif part < q_parts + kv_parts:
        first = (part - q_parts) * BLOCK
        keys = qkv + HEADS * HEAD_DIM
        source, target, row, live = _heads_of(keys, k_cache, places, rows, first, qkv_stride, KV_HEADS, HEAD_DIM, BLOCK)
        _turn_heads(
            source, target, row, live, k_norm, cos, sin, HEAD_DIM, HALF, HALF_POW2, REST, REST_POW2, eps, NORM, ZERO_CENTERED
        )  # fmt: skip
    else:
        first = (part - q_parts - kv_parts) * BLOCK
        values = qkv + (HEADS + KV_HEADS) * HEAD_DIM
        source, target, row, live = _heads_of(values, v_cache, places, rows, first, qkv_stride, KV_HEADS, HEAD_DIM, BLOCK)
        at = tl.arange(0, HEAD_POW2)[None, :]
        here = live & (at < HEAD_DIM)
        tl.store(target + at, tl.load(source + at, mask=here), mask=here)
