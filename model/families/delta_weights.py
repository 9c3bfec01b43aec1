"""The tensors of Gated DeltaNet layers: one fused parameter `[q | k | v | z | b | a]` from either way of storing them."""

from __future__ import annotations

from model.families.weights import Pieces, Place
from model.pieces import Piece


def delta_split(out: Pieces, place: Place, target: str, source: str) -> None:
    """Qwen3.5: `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`, in the order of the parameter."""
    shape, hidden = place.config.delta, place.config.hidden_size
    assert shape is not None
    parts = [
        (f"{source}in_proj_qkv.weight", shape.conv_width),
        (f"{source}in_proj_z.weight", shape.value_width),
        (f"{source}in_proj_b.weight", shape.value_heads),
        (f"{source}in_proj_a.weight", shape.value_heads),
    ]
    out.stacked(f"{target}projection.weight.weight", parts, hidden)
    _rest(out, place, target, source)


def delta_interleaved(out: Pieces, place: Place, target: str, source: str) -> None:
    """Qwen3-Next: `in_proj_qkvz` and `in_proj_ba` hold, key head by key head, that head's q, k, v, z, and its b, a."""
    shape, hidden = place.config.delta, place.config.hidden_size
    assert shape is not None
    ratio = shape.value_heads // shape.key_heads
    value_rows = ratio * shape.value_dim
    groups = (
        ("in_proj_qkvz", (shape.key_dim, shape.key_dim, value_rows, value_rows)),
        ("in_proj_ba", (ratio, ratio)),
    )
    pieces = []
    base = 0
    for name, widths in groups:
        disk = (shape.key_heads * sum(widths), hidden)
        for part, width in enumerate(widths):
            for head in range(shape.key_heads):
                read, write = head * sum(widths) + sum(widths[:part]), base + head * width
                pieces.append(
                    Piece(
                        name=f"{source}{name}.weight",
                        shape=disk,
                        source=(slice(read, read + width),),
                        target=(slice(write, write + width),),
                    )
                )
            base += shape.key_heads * width
    out.pieces[f"{target}projection.weight.weight"] = tuple(pieces)
    _rest(out, place, target, source)


def _rest(out: Pieces, place: Place, target: str, source: str) -> None:
    """Convolution, decay parameters, norm and output projection, alike in both."""
    shape, hidden = place.config.delta, place.config.hidden_size
    assert shape is not None
    out.pieces[f"{target}conv"] = (
        Piece(name=f"{source}conv1d.weight", shape=(shape.conv_width, 1, shape.kernel), source=(slice(None), 0)),
    )
    out.whole(f"{target}a_log", f"{source}A_log", shape.value_heads)
    out.whole(f"{target}dt_bias", f"{source}dt_bias", shape.value_heads)
    out.whole(f"{target}norm.weight", f"{source}norm.weight", shape.value_dim)
    out.whole(f"{target}out.weight.weight", f"{source}out_proj.weight", hidden, shape.value_width)
