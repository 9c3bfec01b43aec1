"""Sums of rows: the kernel in the interpreter against the torch form, which tests/unit/state holds against Python integers."""

from __future__ import annotations

import pytest
import torch

from kernels import checksum, checksum_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1), (3, 16), (5, 1023), (2, 1025), (4, 9000), (3, 0)], ids=lambda value: str(value)
)
def test_every_row_has_the_sum_of_the_torch_form(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, width: int
) -> None:
    monkeypatch.setattr(checksum_triton, "PROGRAMS", 12)
    info = torch.iinfo(dtype)
    words = torch.randint(info.min, info.max + 1, (rows, width), generator=torch.Generator().manual_seed(width)).to(dtype)
    for picked in (list(range(rows)), [rows - 1], [rows - 1, 0, rows - 1], []):
        index = torch.tensor(picked, dtype=torch.int64)
        found = checksum_triton.row_sums(words.to(DEVICE), index.to(DEVICE))
        assert torch.equal(found.cpu(), checksum.row_sums(words, index))


def test_rows_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        checksum_triton.row_sums(torch.zeros(4, 4, dtype=torch.int32).T, torch.arange(4))
