"""Batches from host data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model.batch import ForwardBatch, PieceRows
from model.errors import BatchError
from tests.support.batches import Part, Ranks

SPANS: dict[str, Any] = {
    "query_lens": [3, 1, 2],
    "seq_lens": [3, 9, 6],
    "slots": [4, 0, 2],
    "block_tables": [[7], [1, 9, 3], [5, 2, 8]],
    "kv_write_from": [0, 0, 5],
    "wanted_rows": [2, 3],
    "token_ids": torch.arange(6),
    "block_size": 4,
    "device": "cpu",
}


def test_index_arrays() -> None:
    batch = ForwardBatch.from_spans(**SPANS)
    assert batch.positions.tolist() == [0, 1, 2, 8, 4, 5]
    assert batch.query_start.tolist() == [0, 3, 4, 6]
    assert batch.block_tables.tolist() == [[7, 0, 0], [1, 9, 3], [5, 2, 0]]
    assert (batch.slots.tolist(), batch.seq_lens.tolist(), batch.kv_write_from.tolist()) == ([4, 0, 2], [3, 9, 6], [0, 0, 5])
    assert batch.kv_places.tolist() == [28, 29, 30, 12, 9]
    assert batch.written_rows is not None
    assert batch.written_rows.tolist() == [0, 1, 2, 3, 5]
    assert batch.single_rows is not None
    assert batch.single_spans is not None
    assert (batch.single_rows.tolist(), batch.single_spans.tolist(), batch.host.single_lens.tolist()) == ([3], [1], [9])
    assert batch.host.pieces == (PieceRows(0, 0, 3, 3), PieceRows(2, 4, 6, 6))
    assert (batch.host.max_query, batch.host.max_seq, batch.num_rows) == (3, 9, 6)
    assert not batch.decode_only
    for index in (batch.positions, batch.query_start, batch.slots, batch.seq_lens, batch.block_tables, batch.kv_write_from):
        assert index.dtype == torch.int32
    assert {batch.wanted_rows.dtype, batch.kv_places.dtype, batch.single_rows.dtype} == {torch.int64}


def test_every_index_array_starts_where_kernels_are_compiled_for() -> None:
    """Triton compiles a kernel once more for each pointer that is no multiple of 16 bytes."""
    batch = ForwardBatch.from_spans(**SPANS)
    arrays = [value for value in (getattr(batch, name) for name in batch.__slots__) if isinstance(value, torch.Tensor)]
    packed = [array for array in arrays if array is not SPANS["token_ids"]]
    assert len(packed) == 11
    assert [array.storage_offset() * array.element_size() % 16 for array in packed] == [0] * len(packed)


def test_decode_rows_alone() -> None:
    batch = ForwardBatch.from_spans(
        **SPANS | {"query_lens": [1, 1, 1], "kv_write_from": [0, 8, 4], "wanted_rows": [], "token_ids": torch.arange(3)}
    )
    assert batch.decode_only
    assert (batch.written_rows, batch.single_rows, batch.single_spans, batch.host.pieces) == (None, None, None, ())
    assert batch.kv_places.tolist() == [30, 12, 9]
    assert batch.wanted_rows.tolist() == []


@pytest.mark.parametrize(
    "change",
    [
        {"query_lens": [0, 4, 2]},
        {"seq_lens": [2, 9, 6]},
        {"block_tables": [[7], [1, 9], [5, 2]]},
        {"slots": [4, 0]},
        {"token_ids": torch.arange(5)},
        {"kv_write_from": [0, 0]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BatchError):
        ForwardBatch.from_spans(**SPANS | change)


def test_limits_of_the_model(checkpoint: Any) -> None:
    ranks = Ranks(checkpoint("llama", "plain"))
    with pytest.raises(BatchError, match="513 positions; this model has 512"):
        ranks.run(ranks.batch([Part(0, [5] * 513)]))
    with pytest.raises(BatchError, match=r"captures of layers \[2\]"):
        ranks.run(ranks.batch([Part(1, [5])], captures=(2,)))
