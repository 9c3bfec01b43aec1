"""The beginning of a captured step, in the interpreter: what torch's own indexing gives."""

from __future__ import annotations

import pytest
import torch

from kernels.start_triton import embed_rows, start_rows

BLOCK_SIZE = 4


@pytest.mark.parametrize("width", [3, 1500])
def test_columns_become_the_indices_of_a_step(width: int) -> None:
    """Given rows, fed ones, and an idle one, whose row of blocks is not written."""
    tables = torch.randint(1, 1000, (6, width), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    last_tokens = torch.arange(100, 106)
    given, fed, position = [7, 0, 0, 9], [-1, 5, -1, 0], [10, 3, 0, 4 * width - 1]
    slot, length = [2, 5, -1, 0], [11, 4, 0, 4 * width]
    block_tables = torch.full((4, width), -7, dtype=torch.int32)
    start = start_rows(torch.tensor([given, fed, position, slot, length, [1] * 4]), last_tokens, tables, BLOCK_SIZE, block_tables)
    assert start.token_ids.tolist() == [7, 105, 0, 100]
    assert (start.positions.tolist(), start.slots.tolist(), start.lengths.tolist()) == (position, slot, length)
    assert {one.dtype for one in start[1:]} == {torch.int32}
    for row, (own, blocks) in enumerate(((2, 3), (5, 1), (0, 0), (0, width))):
        assert torch.equal(block_tables[row, :blocks], tables[own, :blocks])
        assert (block_tables[row, blocks:] == -7).all()


@pytest.mark.parametrize("width", [1, 48, 2049])
@pytest.mark.parametrize("tokens", [[3], [9, 0, 0, 4], []])
def test_embeddings_come_twice(width: int, tokens: list[int]) -> None:
    table = torch.randn(10, width, generator=torch.Generator().manual_seed(width)).to(torch.bfloat16)
    ids = torch.tensor(tokens, dtype=torch.int64)
    x, kept = embed_rows(ids, table)
    assert torch.equal(x, table[ids])
    assert torch.equal(kept, table[ids])
    assert x.data_ptr() != kept.data_ptr() or not tokens
