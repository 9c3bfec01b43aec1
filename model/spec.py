"""What the rest of the runtime may know about a model: plain data, no torch.

The scheduler plans from a `ModelSpec`, the state registry allocates from it, the handshake compares it. Nothing here depends on a
device or a rank, so every process computes the same spec from the same folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class LayerKind(StrEnum):
    """How a layer mixes tokens."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    LINEAR = "linear_attention"


class Rewind(StrEnum):
    """How a kind of state returns to an earlier length."""

    CURSOR = "cursor"
    """Entries are addressed by position; moving the length back is enough."""
    SNAPSHOT = "snapshot"
    """The state has absorbed its input; only a copy taken earlier restores it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSpec:
    """Paged key/value cache of one attention layer: two tensors `[num_blocks, block_size, kv_heads, head_dim]`."""

    layer: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    rewind: Rewind = Rewind.CURSOR

    def block_elements(self, block_size: int) -> int:
        """Elements of keys and values in one block."""
        return 2 * block_size * self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """One slot-indexed tensor `[max_slots, *shape]` that a layer keeps per sequence.

    `dtype` is a torch dtype's name, or "model" for the model's own. `snapshot` says whether a snapshot must hold it. With `divided`
    each rank keeps a part of its own, which no other rank's can be compared with.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: str = "model"
    rewind: Rewind = Rewind.SNAPSHOT
    snapshot: bool = True
    divided: bool = False

    @property
    def elements(self) -> int:
        """Elements of one slot."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpec:
    """What the rest of the runtime knows of a model's images.

    `placeholders` are the token ids that stand for rows of an image or a video. An image of `h x w` patches of `patch` pixels has
    `h * w / merge**2` rows; a video is cut into groups of `frames` frames, each of which is like an image. A row has `row_width`
    elements: an embedding of the model's hidden size, and one more for each of the first `deepstack` layers.
    """

    placeholders: tuple[int, ...]
    patch: int
    merge: int
    frames: int
    row_width: int
    deepstack: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Sizes, layer kinds, cache layouts and limits of one model folder.

    `max_positions` is what the checkpoint's rotary embedding allows. `eos_token_ids` are the generation config's. `cut_points` is
    the granularity at which a prompt may be chunked (1: anywhere); `single_chunk` models take a prompt in one piece;
    `max_verify_rows` is the most rows of a VERIFY span (1: no speculation). `max_loops` is how often a looped model may run its
    core for a token (1: not looped); a sequence that asks for more than one takes its prompt in one piece.
    """

    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_kinds: tuple[LayerKind, ...]
    caches: tuple[CacheSpec, ...]
    states: tuple[StateSpec, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    moe_layers: tuple[int, ...] = ()
    max_positions: int
    eos_token_ids: tuple[int, ...] = ()
    cut_points: int = 1
    single_chunk: bool = False
    max_verify_rows: int = 1
    max_loops: int = 1
    inputs: tuple[str, ...] = ("text",)
    vision: VisionSpec | None = None
    extras: dict[str, int] = field(default_factory=dict)

    @property
    def rewindable(self) -> bool:
        """True when every state returns to an earlier length by moving a cursor, so any prefix can be shared by its blocks."""
        return all(state.rewind is Rewind.CURSOR for state in self.states)
