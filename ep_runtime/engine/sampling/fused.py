"""The draw of a chunk by one kernel: see `kernels.sampling_triton`."""

from __future__ import annotations

import torch

from kernels.sampling_triton import sample_rows


class FusedDraw:
    """Calls of the kernel, with what stands for filters that a chunk does not have: one kernel is compiled for all of them."""

    def __init__(self, vocab_size: int, max_slots: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._rows = torch.arange(max_slots, device=device)
        self._no_min_p = torch.full((max_slots,), -torch.inf, device=device)
        self._no_top_k = torch.full((max_slots,), vocab_size, device=device)
        self._no_top_p = torch.full((max_slots,), torch.inf, dtype=torch.float64, device=device)

    def draw(
        self, args: dict[str, torch.Tensor], logits: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens [w] int64, status [w] int32) of a chunk, from `rows` of `logits`, or all of them, in order."""
        return sample_rows(
            logits,
            self._rows[: len(logits)] if rows is None else rows,
            args["temperature"],
            args["noise"],
            args["keys"],
            args.get("log_min_p", self._no_min_p),
            args.get("top_k", self._no_top_k),
            args.get("top_p", self._no_top_p),
            self._vocab_size,
        )
