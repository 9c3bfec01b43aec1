"""Log-probabilities of the model's own distribution: log_softmax of the logits before bias, mask, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ep_runtime.engine.staging import download
from model.scratch import SAMPLED_AT_ONCE
from protocol.messages import TokenLogprobs

_ELEMENTS_AT_ONCE = {"cpu": 1 << 18, "cuda": SAMPLED_AT_ONCE["cuda"]}
"""Logits worked on at once: what a CPU's cache holds; on a GPU what the memory plan allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobRows:
    """R rows on one device.

    Column 0 is the chosen token; columns 1 .. K are the best K in descending order, lowest id first among equals.
    """

    ids: torch.Tensor
    """[R, 1 + K] int64"""
    logprobs: torch.Tensor
    """[R, 1 + K] float32"""
    ranks: torch.Tensor
    """[R] int64: 1 + the number of tokens more likely than the chosen one."""

    def to_host_async(self) -> LogprobRows:
        """The same rows in pinned host memory, valid after an event recorded behind this call."""
        return LogprobRows(ids=download(self.ids), logprobs=download(self.logprobs), ranks=download(self.ranks))


def logprob_rows(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> LogprobRows:
    """Rows for logits [R, V] float32 and the chosen ids [R] int64, with the best `count` alternatives (at most V)."""
    rows, vocab = logits.shape
    step = max(1, _ELEMENTS_AT_ONCE[logits.device.type] // vocab)
    starts = range(0, max(1, rows), step)
    pieces = [_piece(logits[start : start + step], chosen[start : start + step], min(count, vocab)) for start in starts]
    ids, logprobs, ranks = zip(*pieces, strict=True)
    return LogprobRows(ids=torch.cat(ids), logprobs=torch.cat(logprobs), ranks=torch.cat(ranks))


def _piece(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.cat([chosen.unsqueeze(1), _best(logits, count)], dim=1)
    picked = logits.gather(1, ids)
    ranks = (logits > picked[:, :1]).sum(dim=1) + 1
    return ids, picked - logits.logsumexp(dim=1, keepdim=True), ranks


def _best(logits: torch.Tensor, count: int) -> torch.Tensor:
    """[R, count] int64: ids of the largest logits, descending, lowest id first among equals.

    topk leaves the order of equal values open, so it runs on integers without equals: the float's bits made monotone (negative
    floats order backwards as integers; + 0.0 joins the two zeros) above the complement of the id.
    """
    if count == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    vocab = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)
    bits = bits ^ (bits >> 31).bitwise_and_(0x7FFF_FFFF)
    keys = (bits.to(torch.int64) << 32) + torch.arange(vocab - 1, -1, -1, device=logits.device)
    return (vocab - 1) - keys.topk(count, dim=1, sorted=True).values.bitwise_and_(0xFFFF_FFFF)


def unpack_logprobs(host: LogprobRows, counts: Sequence[int]) -> list[TokenLogprobs]:
    """One `TokenLogprobs` a row, from tensors on the host, each cut to its own number of alternatives."""
    rows = zip(host.ids.tolist(), host.logprobs.tolist(), host.ranks.tolist(), counts, strict=True)
    return [
        TokenLogprobs(logprob=values[0], rank=rank, top_ids=ids[1 : 1 + count], top_logprobs=values[1 : 1 + count])
        for ids, values, rank, count in rows
    ]
