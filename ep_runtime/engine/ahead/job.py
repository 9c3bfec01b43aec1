"""What is told to the process that compiles a rank's kernels, and what it answers: JSON, a line each."""

from __future__ import annotations

import msgspec


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's model and its bounds.

    `device` is the GPU's name, `capability` its generation as Triton counts (90 for 9.0). `peers`: sums go through peer memory.
    `buckets` are the rows of captured steps. The list of kernels is begun at the `local_rank`-th of `local_ranks` parts, so that
    ranks of one host, whose lists are nearly the same, find each other's work in the cache.
    """

    folder: str
    rank: int
    world: int
    dtype: str
    layout: str
    device: str
    capability: int
    block_size: int
    max_slots: int
    max_rows: int
    max_model_len: int
    buckets: list[int]
    peers: bool
    processes: int
    local_rank: int
    local_ranks: int


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel as compiled for some kinds of arguments.

    `data` is for Triton's `preload`; `hash` is what its cache calls the result, empty before there is one.
    """

    module: str
    name: str
    data: str
    hash: str = ""
