"""What the largest step of a served model needs beside weights, caches and states: an upper bound, from the configuration alone.

As `model.scratch` bounds a decoder's: a phase's bytes are those of the tensors that live at its worst moment, on top of what lives
throughout. Attention, recurrence and logits are the same kernels, and counted there; a test holds the torch forms against peaks.
"""

from __future__ import annotations

from dataclasses import replace

from model.config import AttentionConfig, DeltaNetConfig
from model.scratch import DIGESTED, FLOAT, StepSize, attention_bytes, delta_bytes, logit_bytes
from model.trellis.config import BANK_READ_POINTS, TrellisConfig
from model.trellis.served.bank import DIGITS, READ_ROWS

LONG = 8
"""Bytes of an int64 or a float64."""


def step_bytes(config: TrellisConfig, size: StepSize) -> int:
    """The worst phase of the largest step, whatever the number of loops: a layer, a read of the bank, the logits, or the digest."""
    phases = [
        size.rows * _norm_row(config, size)
        + max(_attention(config, size), _delta(config, size), size.rows * _mlp_row(config, size)),
        _bank(config, size),
        # The head has the whole output projection: nothing is gathered.
        logit_bytes(config.vocab_size, replace(size, world=1)) if size.head else 0,
        DIGESTED,
    ]
    return size.rows * _carried_row(config, size) + max(phases)


def _carried_row(config: TrellisConfig, size: StepSize) -> int:
    """A row throughout: embedding, residual, rows of a later loop and their result, rotary tables, slots read, indices."""
    slots = BANK_READ_POINTS * config.bank_heads * config.bank_top_k * 4
    return 4 * config.d_model * size.element + 6 * config.head_dim * FLOAT + 2 * slots + 128


def _norm_row(config: TrellisConfig, size: StepSize) -> int:
    """A layer's normed input, its mixer's output and their sum, and the norm's float32 copies, which are the router's too."""
    return config.d_model * (4 * size.element + 3 * FLOAT)


def _attention(config: TrellisConfig, size: StepSize) -> int:
    """Projections with the adapter's part, and what the kernels count. Of a piece whose rows do not all run, it attends whole."""
    width, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shape = AttentionConfig(
        heads=config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim, qk_norm=config.qk_norm != "none"
    )
    joined = 5 * width + 2 * kv + config.lora_rank
    return size.rows * size.element * joined + attention_bytes(shape, size)


def _delta(config: TrellisConfig, size: StepSize) -> int:
    """The recurrence, in torch on every device. Each row of a captured step has its state before and after besides."""
    shape = DeltaNetConfig(
        key_heads=config.gdn_heads,
        value_heads=config.gdn_heads,
        key_dim=config.gdn_key_dim,
        value_dim=config.gdn_value_dim,
        kernel=config.gdn_conv,
    )
    channels, matrix = config.gdn_channels, config.gdn_heads * config.gdn_key_dim * config.gdn_value_dim
    adapted = 2 * config.gdn_heads * config.gdn_key_dim + config.lora_rank
    kept = 2 * (matrix * FLOAT + (config.gdn_conv - 1) * channels * size.element) if size.kernels else 0
    rows = size.rows * size.element * (channels + adapted)
    return rows + size.slots * kept + delta_bytes(shape, replace(size, kernels=False))


def _mlp_row(config: TrellisConfig, size: StepSize) -> int:
    """Gate, up with its adapter's part and their sum, and the product; then two outputs."""
    return size.element * (5 * config.mlp_dim + 2 * config.d_model + config.lora_rank)


def _bank(config: TrellisConfig, size: StepSize) -> int:
    """The keys in float32, a tile's lookup and values, and all rows' sums: as int64, and over ranks in digits, added up."""
    tile = min(size.rows, READ_ROWS)
    sums = config.bank_value_dim * (2 * LONG + 2 * FLOAT)
    if size.world > 1:
        lanes = DIGITS * config.bank_value_dim
        sums += lanes * (3 * LONG + FLOAT * (size.world + 3))
    ends = config.d_model * (2 * size.element + FLOAT)
    keys = 2 * 2 * config.bank_sub_keys * config.bank_key_dim * FLOAT
    return keys + size.rows * (sums + ends) + tile * max(_lookup_row(config), _values_row(config, size))


def _lookup_row(config: TrellisConfig) -> int:
    """Scores of both halves and the grid of candidates, each sorted: values and numbers, in and out."""
    sort = 2 * FLOAT + 2 * LONG
    halves = config.bank_heads * 2 * config.bank_sub_keys
    grid = config.bank_heads * config.bank_top_k**2
    queries = config.bank_heads * 2 * config.bank_key_dim
    return (halves + grid) * (FLOAT + sort) + grid * LONG + 4 * queries * FLOAT + config.d_model * 2 * FLOAT


def _values_row(config: TrellisConfig, size: StepSize) -> int:
    """The values of a row's slots: read, in float32 and with the other ranks' as zeros, weighted, and in fixed point."""
    picked = config.bank_heads * config.bank_top_k
    return picked * (config.bank_value_dim * (size.element + 3 * FLOAT + 3 * LONG) + 8 * LONG)
