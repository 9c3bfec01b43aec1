"""What an encoding of images takes beside weights and the rows that it gives: an upper bound, from the configuration alone."""

from __future__ import annotations

from math import isqrt

from model.vision.config import VisionConfig
from model.vision.tiles import TILE

FLOAT = 4
LONG = 8


def tower_scratch(config: VisionConfig, patches: int, dtype_size: int) -> int:
    """Bytes of an encoding of `patches` patches and of the worst moment of its begin, a block, a merger or its rows.

    `dtype_size`: bytes of an element of the model's dtype. The sizes follow `model.vision.tower`.
    """
    e, n, d = dtype_size, patches, config.hidden
    features = n // config.merge**2 * config.out_hidden * e
    carried = n * (d * e + 2 * config.head_dim * FLOAT) + len(config.deepstack) * features
    phases = (_begin(config, n, e), _attention(config, n, e), _mlp(config, n, e), _merger(config, n, e) + features)
    rows = features + n // config.merge**2 * config.row_width * e
    return carried + max(*phases, rows)


def _begin(config: VisionConfig, n: int, e: int) -> int:
    """Pixels, then positions or the values of patches; or the rotary tables. One image may have all patches."""
    d, width = config.hidden, config.patch_width
    lines = config.side * d * FLOAT * (config.side + isqrt(n))
    positions = n * d * (2 * FLOAT + e) + lines
    embedded = n * (width * (1 + FLOAT + e) + 2 * d * e)
    tables = n * (4 * LONG + config.head_dim * (LONG + 4 * FLOAT))
    return n * width + max(positions, embedded, tables)


def _attention(config: VisionConfig, n: int, e: int) -> int:
    """The fused projection, with the turning of a tile, or with the attention's output twice and its sums."""
    turned = min(n, TILE) * config.hidden * 4 * FLOAT
    attended = n * (config.hidden * e + config.heads * FLOAT)
    return n * config.hidden * 4 * e + max(turned, attended)


def _mlp(config: VisionConfig, n: int, e: int) -> int:
    return min(n, TILE) * 2 * e * (config.hidden + config.intermediate)


def _merger(config: VisionConfig, n: int, e: int) -> int:
    """Norm, hidden units twice, and the rows of a tile."""
    return min(n, TILE) * e * (3 * config.hidden + config.out_hidden // config.merge**2)
