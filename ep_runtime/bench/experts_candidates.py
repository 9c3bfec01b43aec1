"""Tiles of the expert kernels that are tried; more of them cost compile time, so those that lost everywhere should go."""

from __future__ import annotations

from kernels.experts_config import Tile

DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of rows for which layers are timed as decode steps launch them."""

PAIRED_UP_TO = 8
"""Up to this many rows the paired form is timed."""


def _paired(*tiles: tuple[int, int, int, int, int]) -> list[Tile]:
    """Outputs, depth, warps, stages and choices at once of each."""
    return [Tile(block_m=m, block_n=n, block_k=k, warps=w, stages=s) for n, k, w, s, m in tiles]


def _grouped(block_m: int, *tiles: tuple[int, int, int, int, str]) -> list[Tile]:
    """Outputs, depth, warps, stages and flags of each: s for swap, d for descriptors, p or pp for programs that stay."""
    return [
        Tile(
            block_m=block_m,
            block_n=n,
            block_k=k,
            warps=w,
            stages=s,
            swap="s" in flags,
            descriptors="d" in flags,
            persistent=flags.count("p"),
        )
        for n, k, w, s, flags in tiles
    ]


PAIRED = {
    "gate_up": _paired(
        *((4, 512, 4, 3, 1), (8, 512, 4, 3, 1), (8, 256, 4, 3, 1), (8, 256, 4, 4, 1)),
        *((2, 1024, 4, 3, 1), (4, 1024, 4, 2, 1), (8, 512, 8, 3, 1), (4, 256, 2, 4, 1)),
    ),
    "down": _paired(
        *((4, 256, 4, 1, 4), (8, 256, 4, 1, 4), (8, 256, 8, 1, 4), (4, 256, 4, 1, 8), (8, 256, 4, 1, 2)),
        *((4, 512, 4, 1, 4), (4, 512, 4, 1, 2), (8, 512, 8, 1, 4), (2, 512, 2, 1, 4), (4, 1024, 4, 1, 2)),
    ),
}

GROUPED = {
    16: {
        "gate_up": _grouped(
            16,
            *((32, 128, 4, 4, ""), (32, 256, 4, 3, ""), (64, 128, 4, 3, "s")),
            *((32, 128, 4, 3, "d"), (64, 128, 4, 3, "sd"), (64, 64, 4, 6, "sd"), (128, 64, 4, 4, "sd")),
        ),
        "down": _grouped(
            16,
            *((64, 128, 4, 4, ""), (128, 64, 4, 4, ""), (64, 256, 4, 3, "d")),
            *((64, 128, 4, 4, "sd"), (128, 64, 4, 6, "sd"), (128, 128, 4, 3, "sd"), (64, 256, 4, 2, "sd")),
        ),
    },
    32: {
        "gate_up": _grouped(
            32, (64, 128, 4, 3, ""), (64, 64, 4, 5, "s"), (64, 128, 4, 3, "sd"), (64, 64, 4, 6, "sd"), (128, 64, 4, 4, "sd")
        ),
        "down": _grouped(32, (64, 128, 4, 4, ""), (128, 64, 4, 4, "s"), (64, 128, 4, 4, "sd"), (128, 64, 4, 6, "sd")),
    },
    64: {
        "gate_up": _grouped(
            64,
            (64, 64, 4, 4, ""),
            (128, 64, 8, 3, ""),
            (64, 64, 4, 4, "d"),
            (128, 64, 4, 3, "d"),
            (128, 64, 8, 4, "d"),
            (64, 128, 4, 3, "d"),
            *((128, 64, 8, 4, "p"), (128, 64, 4, 4, "p"), (64, 64, 4, 4, "pp")),
        ),
        "down": _grouped(
            64,
            *((128, 64, 4, 4, ""), (256, 64, 8, 3, ""), (128, 64, 4, 4, "d"), (256, 64, 8, 4, "d"), (128, 128, 4, 3, "d")),
            *((256, 64, 8, 4, "p"), (256, 64, 4, 4, "p"), (128, 64, 4, 4, "pp"), (128, 128, 4, 2, "pp")),
        ),
    },
    128: {
        "gate_up": _grouped(
            128,
            *((128, 64, 8, 3, ""), (64, 64, 4, 4, ""), (128, 64, 8, 3, "d"), (128, 64, 8, 4, "d"), (64, 64, 4, 4, "d")),
            *((128, 64, 8, 4, "p"), (128, 64, 8, 3, "p")),
        ),
        "down": _grouped(
            128,
            (128, 64, 8, 3, ""),
            (256, 64, 8, 3, ""),
            (128, 64, 8, 4, "d"),
            (256, 64, 8, 3, "d"),
            (256, 64, 8, 4, "d"),
            (128, 64, 4, 4, "d"),
            *((256, 64, 8, 4, "p"), (128, 64, 4, 3, "pp")),
        ),
    },
}


def block_rows(rows: int, top_k: int, experts: int) -> list[int]:
    """Rows of a block worth trying: those near the number of rows that an expert gets."""
    share = rows * top_k / experts
    if share <= 6:
        return [16]
    if share <= 24:
        return [16, 32]
    if share <= 96:
        return [32, 64]
    return [64, 128]
