"""What the largest admitted step needs beside weights, caches and states: an upper bound, from the configuration alone.

A phase's bytes are those of the tensors that live at its worst moment; a step's are those of its worst phase, on top of what lives
throughout. The forms counted are the torch ones (`kernels.*`, `model.layers.*`) and the fused ones (`model.layers.fused`); a test
holds the torch ones against measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.config import AttentionConfig, DeltaNetConfig, LayerConfig, ModelConfig, MoeConfig
from model.fit import attention_fits, delta_fits
from model.spec import LayerKind

FLOAT = 4
SCORED_ROWS = 256
"""Prompt rows whose logits one step may ask for (prompt logprobs), beside one row a slot: a row of logits is large."""
SAMPLED_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 23}
"""Logits that the sampler works on at once (or one row, if that has more)."""
SAMPLER_BYTES = 72
"""Of the sampler, for each logit that it works on: copies before and after edits, a sort's keys and places, float64 sums."""
GATHERED = 1 << 26
"""Most elements of a cache that decode rows of the torch form gather at once: `kernels.paged_attention.GATHER_ELEMENTS`."""
TILE = 512
"""Rows of a prompt piece that attend at once in the torch form: `kernels.paged_attention.QUERY_TILE`."""
CHUNK = 64
"""Rows of a chunk of the delta rule."""
DENSE_ROWS = 256
"""Up to this many rows the torch form may run every expert on every row: `kernels.experts.DENSE_ROWS`."""
DIGESTED = 5 * (8 << 20)
"""Of a checksum in torch: places, weights and products of 2^20 words at a time, as int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """The largest step of one rank. `kernels`: the fused forms run, not the torch ones. `head`: this rank samples."""

    rows: int
    slots: int
    scored: int
    positions: int
    """Of the longest sequence, a whole number of blocks."""
    element: int
    world: int
    held: int
    """Experts of this rank in a layer."""
    device: str
    kernels: bool
    head: bool

    @property
    def logit_rows(self) -> int:
        """Rows whose logits one step gives."""
        return self.slots + min(self.scored, self.rows)


def scored_rows(cut_points: int, single_chunk: bool, max_rows: int) -> int:
    """Prompt rows of one step that may be scored, by the model's limits: a prompt of one piece is scored whole."""
    return max_rows if single_chunk else max(SCORED_ROWS, cut_points)


def step_bytes(config: ModelConfig, size: StepSize) -> int:
    """The worst phase of the largest step: a layer, the logits, the sampler, or the digest between two steps."""
    throughout = size.rows * _carried_row(config, size)
    if size.kernels and config.moe is not None:
        # A decode step leaves the outputs of a row's choices to the next layer's norm.
        choices = config.moe.top_k + config.moe.alike
        throughout += min(size.rows, size.slots) * (choices - 1) * config.hidden_size * size.element
    phases = [size.rows * norm_row(config.hidden_size, size), logit_bytes(config.vocab_size, size), DIGESTED if config.delta else 0]
    phases += [mixer_bytes(config, layer, size) for layer in config.layers]
    phases += [mlp_bytes(config, layer, size) for layer in config.layers]
    return throughout + max(phases)


def _carried_row(config: ModelConfig, size: StepSize) -> int:
    """Bytes a row has from layer to layer: residual, pending output, shared expert's output, rotary tables, indices, routing.

    With images: the rows inserted into the batch, and a layer's features of them on their way into the residual.
    """
    inserted = 0 if config.vision is None else config.vision.row_width + config.hidden_size
    shared = config.moe is not None and config.moe.shared_intermediate > 0
    routing = 4 * len(config.moe_layers) * (config.moe.top_k if config.moe else 0)
    tables = 6 * config.rope.rotary_dim * FLOAT
    # The hidden states that entered layer 0 are kept when routing is.
    return (config.hidden_size * (3 + shared) + inserted) * size.element + tables + 2 * routing + 128


def norm_row(hidden: int, size: StepSize) -> int:
    """A sum over ranks with its gathered parts and float32 total, then the norm with its float32 copies."""
    return hidden * (size.element * (size.world + 4) + 3 * FLOAT)


def mixer_bytes(config: ModelConfig, layer: LayerConfig, size: StepSize) -> int:
    """A layer's token mixer, with the normed input and the projected output; both twice where a rank takes its own rows out."""
    ends = size.rows * (2 if config.owners == 1 else 4) * config.hidden_size * size.element
    if layer.kind is LayerKind.LINEAR and config.delta is not None:
        return ends + delta_bytes(config.delta, size)
    return ends + attention_bytes(config.attention, size)


def attention_bytes(shape: AttentionConfig, size: StepSize) -> int:
    """Projection, rotation and output of all rows, and what the attention itself gathers or splits."""
    width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projected = width * (2 if shape.output_gate else 1) + 2 * kv
    e = size.element
    if size.kernels and attention_fits(shape.head_dim):
        group, pairs = shape.heads // shape.kv_heads, size.slots * shape.kv_heads
        singles = (256 + pairs) * max(16, 2 * group) * (shape.head_dim + 2)
        step = (256 + 4 * pairs) * (1 << (group - 1).bit_length()) * (shape.head_dim + 4)
        split = max(singles, step) * FLOAT
        return size.rows * e * (projected + 2 * width) + split
    rotated = e * 4 * (width + kv) + (4 * FLOAT * width if shape.qk_norm else 0)
    together = min(size.slots, max(1, GATHERED // (size.positions * kv)))
    piece = size.positions * (2 * kv * e + min(TILE, size.rows) * (3 + e) + 16)
    singles = together * size.positions * (2 * kv * e + 4 + FLOAT)
    return size.rows * (e * (projected + 3 * width) + rotated) + max(piece, singles)


def delta_bytes(shape: DeltaNetConfig, size: StepSize) -> int:
    """Projection, convolution and output of all rows, and one prompt piece of all rows or one row a slot, whichever is more.

    In the torch form a piece holds, in float32 for each row, ten times the keys (repeated for the value heads), eight times the
    values, and five squares of a chunk: see `kernels.gated_delta.delta_chunks`.
    """
    e, heads = size.element, shape.value_heads
    keys, values, channels = heads * shape.key_dim, shape.value_width, shape.conv_width
    matrix = heads * shape.key_dim * shape.value_dim
    projected = channels + values + 2 * heads
    if size.kernels and delta_fits(shape.key_dim, shape.value_dim):
        row = e * (projected + channels + keys + 2 * values) + FLOAT * (heads + 2 * values)
        return size.rows * row + (size.rows // CHUNK + size.slots) * (matrix * e + CHUNK * heads * FLOAT)
    heads_row = FLOAT * (2 * keys + values + 4 * shape.key_width)
    piece = e * 3 * channels + heads_row + FLOAT * (8 * keys + 7 * values + 5 * CHUNK * heads)
    single = e * channels * (3 * shape.kernel + 2) + heads_row + 3 * FLOAT * (matrix + values)
    row = e * (projected + 3 * values) + FLOAT * (4 * heads + 4 * values)
    return size.rows * row + max((size.rows + CHUNK) * piece, size.slots * single)


def mlp_bytes(config: ModelConfig, layer: LayerConfig, size: StepSize) -> int:
    """A layer's MLP, with its normed input and its output."""
    ends = size.rows * 2 * config.hidden_size * size.element
    if layer.sparse and config.moe is not None:
        return ends + moe_bytes(config.moe, config.hidden_size, size)
    return ends + size.rows * 3 * config.intermediate_size * size.element


def moe_bytes(shape: MoeConfig, hidden: int, size: StepSize) -> int:
    """Router and experts, then the shared expert, which kernels run as one more choice of each row where it is like the others.

    Every pair that a rank may hold is counted as if it did.
    """
    e, held, units = size.element, size.held, shape.intermediate
    router = size.rows * ((shape.num_experts + shape.alike) * (e + 2 * FLOAT) + shape.top_k * 64 + 2 * hidden * e)
    if size.kernels:
        experts = size.rows * (shape.top_k + shape.alike) * (units * FLOAT + hidden * e)
    else:
        experts = max(_expert_forms(shape, hidden, size))
    return router + max(experts, size.rows * 4 * shape.shared_intermediate * e) + held * 64


def _expert_forms(shape: MoeConfig, hidden: int, size: StepSize) -> list[int]:
    """The forms of `kernels.experts` that this device may choose."""
    e, held, units = size.element, size.held, shape.intermediate
    # The pairs' inputs, outputs, their concatenation and their places; and all rows with one expert at once.
    grouped = size.rows * e * ((3 * min(shape.top_k, held) + shape.top_k) * hidden + 4 * units)
    dense_row = e * (held * (3 * units + hidden + 1) + 2 * shape.num_experts)
    if shape.top_k == shape.num_experts:
        return [size.rows * dense_row]
    if size.device == "cpu":
        return [grouped]
    return [grouped, min(size.rows, DENSE_ROWS) * dense_row, held // 2 * 3 * units * hidden * e]


def logit_bytes(vocab: int, size: StepSize) -> int:
    """Logits while they are gathered, then while the head samples: raw, picked, and for logprobs copied once more."""
    wanted = size.logit_rows * vocab
    gathered = wanted * (size.element * (1 if size.world == 1 else 3) + (FLOAT if size.element != FLOAT else 0))
    if not size.head:
        return wanted * size.element if size.device != "cpu" else gathered // size.world
    at_once = max(vocab, SAMPLED_AT_ONCE["cpu" if size.device == "cpu" else "cuda"])
    sampled = FLOAT * (wanted + 2 * size.slots * vocab) + SAMPLER_BYTES * min(at_once, size.logit_rows * vocab)
    return max(gathered, sampled)
