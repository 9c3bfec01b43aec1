"""`kernels.checksum.row_sums` on the GPU: one launch that reads every row once, whatever their number, and a sum of its parts.

Numbers and lengths of rows are not specialised: one kernel serves every tensor whose integers have one size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Parameters of kernels are pointers and scalars of the device, which have no Python type.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.checksum import GOLDEN, MIX
from kernels.launch import cdiv

BLOCK = 1024
PROGRAMS = 4096
"""About as many as keep the memory of a large GPU busy."""


def row_sums(words: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """int64 `[n]`: the sum of each of `rows` [n] int64 of contiguous `words [rows, width]`, of integers of any size."""
    count, width = len(rows), words.shape[1]
    if not words.is_contiguous():
        raise ValueError("rows must be contiguous")
    if count == 0 or width == 0:
        return torch.zeros(count, dtype=torch.int64, device=words.device)
    blocks = cdiv(width, BLOCK)
    share = cdiv(blocks, max(1, min(blocks, PROGRAMS // count)))
    parts = cdiv(blocks, share)
    sums = torch.empty(count, parts, dtype=torch.int64, device=words.device)
    _row_kernel[(count, parts)](words, rows, sums, width, share, GOLDEN=GOLDEN, MIX=MIX, BLOCK=BLOCK)
    return sums.sum(1)


@triton.jit(do_not_specialize=["width", "share"])
def _row_kernel(words, rows, sums, width, share, GOLDEN: tl.constexpr, MIX: tl.constexpr, BLOCK: tl.constexpr):
    index, part = tl.program_id(0), tl.program_id(1)
    words += tl.load(rows + index) * width
    begin = part * share * BLOCK
    end = tl.minimum(begin + share * BLOCK, width)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        word = tl.load(words + place, mask=place < end, other=0).to(tl.int64)
        spread = (place + 1).to(tl.int64) * GOLDEN
        total += word * (((spread ^ (spread >> 31)) * MIX) | 1)
    tl.store(sums + index * tl.num_programs(1) + part, tl.sum(total, 0))
