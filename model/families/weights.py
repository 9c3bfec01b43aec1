"""Which tensors of a checkpoint make which parameter: the parts that families are put together from.

Checkpoints keep a matrix `[out, in]`. A `Source` finds names and shapes in a folder's manifest, so that the two layouts of experts
(a tensor for each, or all of a layer in one) and the two orientations of the latter are told apart by what is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from model.config import FamilyConfig, ModelConfig
from model.parallel import ExpertPlacement, Parallel
from model.pieces import Index, Piece, WeightMap

Manifest = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape on disk."""
C = TypeVar("C", bound=FamilyConfig)


@dataclass(slots=True)
class Pieces:
    """A weight map in the making."""

    pieces: dict[str, tuple[Piece, ...]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    foreign: set[str] = field(default_factory=set)

    def whole(self, parameter: str, name: str, *shape: int) -> None:
        """The parameter is one tensor."""
        self.pieces[parameter] = (Piece(name=name, shape=shape),)

    def stacked(self, parameter: str, parts: Sequence[tuple[str, int]], *rest: int) -> None:
        """The parameter's rows are those of several tensors `(name, rows)`, below each other."""
        pieces = []
        start = 0
        for name, rows in parts:
            pieces.append(Piece(name=name, shape=(rows, *rest), target=(slice(start, start + rows),)))
            start += rows
        self.pieces[parameter] = tuple(pieces)

    def finish(self) -> WeightMap:
        """The finished map."""
        return WeightMap(pieces=self.pieces, ignored=tuple(self.ignored), foreign=frozenset(self.foreign))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """How a family names the tensors of its experts, below the MoE block."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceOf(Generic[C]):
    """What the pieces of one rank depend on: the configuration, who holds what, and what the folder holds."""

    config: C
    placement: ExpertPlacement
    parallel: Parallel
    manifest: Manifest


Place = PlaceOf[ModelConfig]
"""A decoder's."""


def first_present(manifest: Manifest, candidates: Sequence[str], suffix: str) -> str:
    """The first candidate that, with `suffix`, is in the manifest; without any, the first, whose absence is reported later."""
    return next((candidate for candidate in candidates if candidate + suffix in manifest), candidates[0])


def ends(out: Pieces, place: Place, prefix: str) -> None:
    """Embedding, final norm and head."""
    config, parallel = place.config, place.parallel
    vocab, hidden = config.vocab_size, config.hidden_size
    table = Piece(name=f"{prefix}embed_tokens.weight", shape=(vocab, hidden), target=(slice(0, vocab),))
    out.pieces["embedding"] = (table,)
    out.whole("norm.weight", f"{prefix}norm.weight", hidden)
    if config.tied:
        out.ignored.append("lm_head.")
        return
    rows = parallel.vocab_rows(vocab)
    out.pieces["head.weight.weight"] = ()
    if len(rows):
        index = (slice(rows.start, rows.stop),)
        out.pieces["head.weight.weight"] = (
            Piece(name="lm_head.weight", shape=(vocab, hidden), source=index, target=(slice(0, len(rows)),)),
        )
    else:
        out.foreign.add("lm_head.weight")


def norms(out: Pieces, place: Place, target: str, source: str) -> None:
    """The two norms of a layer."""
    out.whole(f"{target}mixer_norm.weight", f"{source}input_layernorm.weight", place.config.hidden_size)
    out.whole(f"{target}mlp_norm.weight", f"{source}post_attention_layernorm.weight", place.config.hidden_size)


def attention(out: Pieces, place: Place, target: str, source: str) -> None:
    """Fused projection, output projection and the norms of heads. A gated query projection holds, head by head, query and gate."""
    shape, hidden = place.config.attention, place.config.hidden_size
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for kind, columns in (("weight", (hidden,)), ("bias", ())) if shape.bias else (("weight", (hidden,)),):
        parameter = f"{target}qkv.weight.weight" if kind == "weight" else f"{target}qkv.bias"
        keys, values = f"{source}k_proj.{kind}", f"{source}v_proj.{kind}"
        if shape.output_gate:
            pieces = _gated_queries(f"{source}q_proj.{kind}", shape.heads, shape.head_dim, 2 * kv_width, columns)
            for start, name in ((width, keys), (width + kv_width, values)):
                pieces.append(Piece(name=name, shape=(kv_width, *columns), target=(slice(start, start + kv_width),)))
            out.pieces[parameter] = tuple(pieces)
        else:
            out.stacked(parameter, [(f"{source}q_proj.{kind}", width), (keys, kv_width), (values, kv_width)], *columns)
    out.whole(f"{target}out.weight.weight", f"{source}o_proj.weight", hidden, width)
    if shape.bias:
        out.whole(f"{target}out.bias", f"{source}o_proj.bias", hidden)
    if shape.qk_norm:
        out.whole(f"{target}q_norm.weight", f"{source}q_norm.weight", shape.head_dim)
        out.whole(f"{target}k_norm.weight", f"{source}k_norm.weight", shape.head_dim)
    out.ignored.append(f"{source}rotary_emb.")


def _gated_queries(name: str, heads: int, head_dim: int, kv_rows: int, columns: tuple[int, ...]) -> list[Piece]:
    """Queries go to the front, gates behind keys and values."""
    disk = (2 * heads * head_dim, *columns)
    width = heads * head_dim
    pieces = []
    for head in range(heads):
        for half, start in ((0, 0), (1, width + kv_rows)):
            read = (2 * head + half) * head_dim
            write = start + head * head_dim
            pieces.append(
                Piece(name=name, shape=disk, source=(slice(read, read + head_dim),), target=(slice(write, write + head_dim),))
            )
    return pieces


def mlp(out: Pieces, place: Place, target: str, source: str, intermediate: int) -> None:
    """A dense MLP, or the shared expert."""
    hidden = place.config.hidden_size
    parts = [(f"{source}gate_proj.weight", intermediate), (f"{source}up_proj.weight", intermediate)]
    out.stacked(f"{target}gate_up.weight.weight", parts, hidden)
    out.whole(f"{target}down.weight.weight", f"{source}down_proj.weight", hidden, intermediate)


def moe(out: Pieces, place: Place, target: str, source: str, names: ExpertNames) -> None:
    """Router, this rank's experts in either layout, and the shared expert."""
    shape, hidden = place.config.moe, place.config.hidden_size
    assert shape is not None
    out.whole(f"{target}router.weight.weight", f"{source}gate.weight", shape.num_experts, hidden)
    if f"{source}experts.gate_up_proj" in place.manifest:
        _experts_together(out, place, target, f"{source}experts.")
    else:
        _experts_apart(out, place, target, f"{source}experts.", names)
    if shape.shared_intermediate:
        mlp(out, place, f"{target}shared.", f"{source}shared_expert.", shape.shared_intermediate)
        out.whole(f"{target}shared_gate.weight.weight", f"{source}shared_expert_gate.weight", 1, hidden)


def _experts_apart(out: Pieces, place: Place, target: str, source: str, names: ExpertNames) -> None:
    """A tensor for each projection of each expert."""
    shape, hidden = place.config.moe, place.config.hidden_size
    assert shape is not None
    units = shape.intermediate
    gate_up, down = [], []
    held = place.placement.local(place.parallel.rank)
    for local, expert in enumerate(held):
        for half, name in enumerate((names.gate, names.up)):
            rows: Index = (local, slice(half * units, (half + 1) * units))
            gate_up.append(Piece(name=f"{source}{expert}.{name}.weight", shape=(units, hidden), target=rows))
        down.append(Piece(name=f"{source}{expert}.{names.down}.weight", shape=(hidden, units), target=(local,)))
    out.pieces[f"{target}gate_up.weight"], out.pieces[f"{target}down.weight"] = tuple(gate_up), tuple(down)
    mine = frozenset(held)
    for expert in range(shape.num_experts):
        if expert not in mine:
            out.foreign.update(f"{source}{expert}.{name}.weight" for name in (names.gate, names.up, names.down))


def _experts_together(out: Pieces, place: Place, target: str, source: str) -> None:
    """All experts of a layer in two tensors, `[experts, 2 units, hidden]` and `[experts, hidden, units]`, or both transposed."""
    shape, hidden = place.config.moe, place.config.hidden_size
    assert shape is not None
    experts, units = shape.num_experts, shape.intermediate
    usual = {"gate_up": (experts, 2 * units, hidden), "down": (experts, hidden, units)}
    turned = {part: (experts, inner, outer) for part, (_, outer, inner) in usual.items()}
    transposed = all(place.manifest.get(f"{source}{part}_proj") == turned[part] != usual[part] for part in usual) or (
        # With square gate_up tensors the other one tells.
        2 * units == hidden and place.manifest.get(f"{source}down_proj") == turned["down"]
    )
    for part in usual:
        name = f"{source}{part}_proj"
        out.pieces[f"{target}{part}.weight"] = tuple(
            Piece(name=name, shape=(turned if transposed else usual)[part], source=(expert,), target=(local,), transpose=transposed)
            for local, expert in enumerate(place.placement.local(place.parallel.rank))
        )
        if not out.pieces[f"{target}{part}.weight"]:
            out.foreign.add(name)
