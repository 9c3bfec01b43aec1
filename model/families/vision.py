"""The tensors of a vision tower, and where a config.json has its text part."""

from __future__ import annotations

from model.config import ModelConfig
from model.errors import UnsupportedModel
from model.families.fields import Json
from model.families.weights import Pieces, Place, first_present
from model.vision.config import CHANNELS, VisionConfig, read_vision

ROOTS = ("model.visual.", "visual.")
"""Where checkpoints keep the tower; older ones outside of the model."""
CONDITIONAL = "ForConditionalGeneration"


def text_part(config: Json, architecture: str) -> Json:
    """`text_config` where the text model is one part of several, else all of it."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise UnsupportedModel(f"config.json: text_config of {architecture} is not an object")
    return text


def vision_part(config: Json, text: ModelConfig, *, deepstack: bool) -> VisionConfig | None:
    """The tower of an architecture that takes images, when its config.json describes one."""
    if not text.architecture.endswith(CONDITIONAL) or config.get("vision_config") is None:
        return None
    return read_vision(
        config, hidden_size=text.hidden_size, vocab_size=text.vocab_size, layers=len(text.layers), deepstack=deepstack
    )


def vision_weights(out: Pieces, place: Place) -> None:
    """Rank 0 reads the tower; the others know its names. Without a tower in the configuration its tensors are left unread."""
    config = place.config.vision
    if config is None:
        out.ignored += ROOTS
        return
    tower = Pieces()
    _tower(tower, config, first_present(place.manifest, ROOTS, "patch_embed.proj.weight"))
    if place.parallel.rank == 0:
        out.pieces |= tower.pieces
    else:
        out.foreign.update(piece.name for pieces in tower.pieces.values() for piece in pieces)


def _tower(out: Pieces, config: VisionConfig, root: str) -> None:
    hidden = config.hidden
    out.whole("tower.patch_weight", f"{root}patch_embed.proj.weight", hidden, CHANNELS, config.frames, config.patch, config.patch)
    out.whole("tower.patch_bias", f"{root}patch_embed.proj.bias", hidden)
    out.whole("tower.positions", f"{root}pos_embed.weight", config.side**2, hidden)
    for number in range(config.depth):
        target, source = f"tower.blocks.{number}.", f"{root}blocks.{number}."
        for norm in ("norm1", "norm2"):
            _norm(out, f"{target}{norm}", f"{source}{norm}", hidden)
        _linear(out, f"{target}qkv", f"{source}attn.qkv", 3 * hidden, hidden)
        _linear(out, f"{target}out", f"{source}attn.proj", hidden, hidden)
        _linear(out, f"{target}up", f"{source}mlp.linear_fc1", config.intermediate, hidden)
        _linear(out, f"{target}down", f"{source}mlp.linear_fc2", hidden, config.intermediate)
    _merger(out, config, "tower.merger.", f"{root}merger.", hidden)
    for number in range(len(config.deepstack)):
        _merger(out, config, f"tower.deepstack.{number}.", f"{root}deepstack_merger_list.{number}.", config.merged)


def _merger(out: Pieces, config: VisionConfig, target: str, source: str, normed: int) -> None:
    _norm(out, f"{target}norm", f"{source}norm", normed)
    _linear(out, f"{target}up", f"{source}linear_fc1", config.merged, config.merged)
    _linear(out, f"{target}down", f"{source}linear_fc2", config.out_hidden, config.merged)


def _norm(out: Pieces, target: str, source: str, size: int) -> None:
    out.whole(f"{target}.weight", f"{source}.weight", size)
    out.whole(f"{target}.bias", f"{source}.bias", size)


def _linear(out: Pieces, target: str, source: str, rows: int, columns: int) -> None:
    out.whole(f"{target}.weight.weight", f"{source}.weight", rows, columns)
    out.whole(f"{target}.bias", f"{source}.bias", rows)
