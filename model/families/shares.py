"""The weight map of a rank that has a part of the heads: cut from the map that reads all of them.

What is cut are the rows of fused projections and the columns of what follows them, whatever tensors they come from, so families
name their tensors once for all layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from model.config import AttentionConfig, DeltaNetConfig, ModelConfig
from model.loading.geometry import box, read_shape
from model.pieces import Piece, WeightMap
from model.share import part
from model.spec import LayerKind


@dataclass(frozen=True, slots=True)
class Cut:
    """The positions of a whole parameter's dimension `dim` that a rank has, in their order."""

    dim: int
    kept: tuple[range, ...]


def share_weights(whole: WeightMap, config: ModelConfig, rank: int) -> WeightMap:
    """The map of `rank`, of the ranks that `config` is divided among. A bias that follows a sum over ranks is rank 0's alone."""
    if config.split == 1:
        return whole
    pieces, foreign = dict(whole.pieces), set(whole.foreign)
    for number, layer in enumerate(config.layers):
        root = f"layers.{number}."
        cuts = _delta_cuts(config, rank) if layer.kind is LayerKind.LINEAR else attention_cuts(config.attention, rank, config.split)
        cuts = {f"mixer.{name}": cut for name, cut in cuts.items()}
        if not layer.sparse:
            cuts |= {f"mlp.{name}": cut for name, cut in mlp_cuts(config.intermediate_size, rank, config.split).items()}
        for name, cut in cuts.items():
            if root + name in pieces:
                pieces[root + name] = take(pieces[root + name], cut)
        bias = f"{root}mixer.out.bias"
        if bias in pieces and rank != 0:
            foreign.update(piece.name for piece in pieces[bias])
            pieces[bias] = ()
    return replace(whole, pieces=pieces, foreign=frozenset(foreign))


def take(pieces: Sequence[Piece], cut: Cut) -> tuple[Piece, ...]:
    """What remains of a parameter's pieces when only the positions of `cut` are kept, moved together."""
    taken = []
    for piece in pieces:
        assert not piece.transpose, "projections lie on disk as they do in memory"
        shape = read_shape(piece)
        target = [slice(0, size) for size in shape]
        for dim, index in enumerate(piece.target):
            assert isinstance(index, slice), "a projection's target keeps its dimensions"
            target[dim] = slice(index.start, index.stop)
        first = target[cut.dim].start
        place = 0
        for kept in cut.kept:
            low, high = max(kept.start, first), min(kept.stop, target[cut.dim].stop)
            if low < high:
                start = place + low - kept.start
                moved = [*target[: cut.dim], slice(start, start + high - low), *target[cut.dim + 1 :]]
                source = _narrow(piece, cut.dim, low - first, high - low)
                taken.append(replace(piece, source=source, target=tuple(moved)))
            place += len(kept)
    return tuple(taken)


def _narrow(piece: Piece, dim: int, start: int, length: int) -> tuple[slice | int, ...]:
    """The piece's source, of which dimension `dim` of what it reads is cut to `length` positions from `start` on."""
    ranges = box(piece.shape, piece.source)
    index: list[slice | int] = [
        given if isinstance(given, int) else slice(found.start, found.stop)
        for given, found in zip([*piece.source, *[slice(None)] * (len(ranges) - len(piece.source))], ranges, strict=True)
    ]
    kept = [place for place, given in enumerate(index) if isinstance(given, slice)]
    at = kept[dim]
    index[at] = slice(ranges[at].start + start, ranges[at].start + start + length)
    return tuple(index)


def attention_cuts(shape: AttentionConfig, rank: int, ranks: int) -> dict[str, Cut]:
    """Of the parameter `[q | k | v | gate]` the rows of the rank's heads; of the output projection, their columns."""
    queries = _widen(part(shape.heads, rank, ranks), shape.head_dim)
    keys = _widen(part(shape.kv_heads, rank, ranks), shape.head_dim)
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = [queries, _moved(keys, width), _moved(keys, width + kv_width)]
    if shape.output_gate:
        rows.append(_moved(queries, width + 2 * kv_width))
    projection = Cut(0, tuple(rows))
    return {"qkv.weight.weight": projection, "qkv.bias": projection, "out.weight.weight": Cut(1, (queries,))}


def _delta_cuts(config: ModelConfig, rank: int) -> dict[str, Cut]:
    assert config.delta is not None
    return delta_cuts(config.delta, rank, config.split)


def delta_cuts(shape: DeltaNetConfig, rank: int, ranks: int) -> dict[str, Cut]:
    """Of `[q | k | v | z | b | a]` the rows of the rank's value heads and their key heads; the same of what belongs to heads."""
    own = part(shape.value_heads, rank, ranks)
    keys = _widen(part(shape.key_heads, rank, ranks), shape.key_dim)
    values = _widen(own, shape.value_dim)
    channels = (keys, _moved(keys, shape.key_width), _moved(values, 2 * shape.key_width))
    gates = shape.conv_width
    rest = (
        _moved(values, gates),
        _moved(own, gates + shape.value_width),
        _moved(own, gates + shape.value_width + shape.value_heads),
    )
    return {
        "projection.weight.weight": Cut(0, channels + rest),
        "conv": Cut(0, channels),
        "a_log": Cut(0, (own,)),
        "dt_bias": Cut(0, (own,)),
        "out.weight.weight": Cut(1, (values,)),
    }


def mlp_cuts(units: int, rank: int, ranks: int) -> dict[str, Cut]:
    """Of `[gate | up]` the rows of the rank's units; of the down projection, their columns."""
    own = part(units, rank, ranks)
    return {"gate_up.weight.weight": Cut(0, (own, _moved(own, units))), "down.weight.weight": Cut(1, (own,))}


def _widen(heads: range, width: int) -> range:
    return range(heads.start * width, heads.stop * width)


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
