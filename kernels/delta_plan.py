"""The work of a chunked Gated DeltaNet prefill as tables of plain integers, made on the host where lengths are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kernels.gated_delta import CHUNK


class DeltaPlan(NamedTuple):
    """Tables int32 on the device: chunks `[N, 4]` and spans `[S, 2]`.

    A chunk: its first row, rows of its span before it, rows of its span, its span. A span: its first chunk, its chunks.
    Chunks are in row order; a chunk has CHUNK rows, the last one of a span what is left.
    """

    chunks: torch.Tensor
    spans: torch.Tensor


def delta_tables(query_start: np.ndarray, spans: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The two tables of a plan for some spans of a batch. Spans without rows have no chunks, and keep their states."""
    chunks: list[tuple[int, int, int, int]] = []
    pieces: list[tuple[int, int]] = []
    for span in spans:
        first, rows = int(query_start[span]), int(query_start[span + 1] - query_start[span])
        if rows == 0:
            continue
        pieces.append((len(chunks), -(-rows // CHUNK)))
        chunks += [(first + before, before, rows, span) for before in range(0, rows, CHUNK)]
    return np.array(chunks, dtype=np.int32).reshape(-1, 4), np.array(pieces, dtype=np.int32).reshape(-1, 2)


def delta_plan(query_start: np.ndarray, spans: Sequence[int], device: torch.device | str) -> DeltaPlan:
    """The plan on the device, in two copies; once a forward for all its layers."""
    chunks, pieces = delta_tables(query_start, spans)
    return DeltaPlan(*(torch.from_numpy(table).to(device, non_blocking=True) for table in (chunks, pieces)))
