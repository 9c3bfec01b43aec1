"""What a vision tower computes, as plain data, from config.json's `vision_config` and the settings of the folder's processors.

No torch. The tower is that of Qwen3-VL, which Qwen3.5 shares but for the deepstack features. The settings are those that Hugging
Face processors are saved with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from model.errors import UnsupportedModel
from model.families.fields import Json, count, real, refuse, whole
from model.spec import VisionSpec

ACTIVATIONS = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}
"""`hidden_act` of the blocks -> torch's name of the approximation of GELU."""
CHANNELS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelScale:
    """A pixel of 0 to 255 becomes `(pixel * rescale - mean) / std`, by colour."""

    rescale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


UNNAMED = {
    "image_processor": PixelScale(
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),  # CLIP's
    ),
    "video_processor": PixelScale(),
}
"""What transformers' processors of these families take where their settings name none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """Sizes of a tower. It takes `frames` frames of patches of `patch` pixels and joins `merge` x `merge` of them to a row."""

    depth: int
    hidden: int
    heads: int
    intermediate: int
    approximate: str
    """GELU of the blocks, as torch names it; the mergers' is exact."""
    patch: int
    merge: int
    frames: int
    side: int
    """Of the square table of position embeddings."""
    theta: float
    """Base of the rotary frequencies."""
    out_hidden: int
    """Hidden size of the text model."""
    deepstack: tuple[int, ...]
    """Blocks whose output gives features for the first layers of the text model, ascending."""
    image_token: int
    video_token: int
    scale: PixelScale = PixelScale()

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads

    @property
    def patch_width(self) -> int:
        """Values of a patch."""
        return CHANNELS * self.frames * self.patch**2

    @property
    def merged(self) -> int:
        """Elements that a merger joins to a row."""
        return self.hidden * self.merge**2

    @property
    def row_width(self) -> int:
        """Elements of a row: the embedding, then the deepstack features."""
        return self.out_hidden * (1 + len(self.deepstack))

    def spec(self) -> VisionSpec:
        """What the runtime needs to know of it."""
        return VisionSpec(
            placeholders=(self.image_token, self.video_token),
            patch=self.patch,
            merge=self.merge,
            frames=self.frames,
            row_width=self.row_width,
            deepstack=len(self.deepstack),
        )


def read_vision(config: Json, *, hidden_size: int, vocab_size: int, layers: int, deepstack: bool) -> VisionConfig:
    """The tower of a config.json that has a `vision_config`, for a text model of these sizes. `deepstack`: the family has it.

    Raises UnsupportedModel for what is not served.
    """
    vision = config["vision_config"]
    if not isinstance(vision, dict):
        raise refuse("vision_config", vision, "an object")
    hidden, heads = whole(vision, "hidden_size"), whole(vision, "num_heads")
    if hidden % heads or hidden // heads % 4:
        raise refuse("vision_config.num_heads", heads, f"heads of a multiple of 4 elements, of hidden_size = {hidden}")
    activation = vision.get("hidden_act", "gelu_pytorch_tanh")
    if activation not in ACTIVATIONS:
        raise refuse("vision_config.hidden_act", activation, ", ".join(ACTIVATIONS))
    if whole(vision, "in_channels", CHANNELS) != CHANNELS:
        raise refuse("vision_config.in_channels", vision["in_channels"], str(CHANNELS))
    if whole(vision, "out_hidden_size") != hidden_size:
        raise refuse("vision_config.out_hidden_size", vision["out_hidden_size"], f"the text model's hidden_size = {hidden_size}")
    positions = whole(vision, "num_position_embeddings")
    if isqrt(positions) ** 2 != positions:
        raise refuse("vision_config.num_position_embeddings", positions, "a square")
    depth = whole(vision, "depth")
    return VisionConfig(
        depth=depth,
        hidden=hidden,
        heads=heads,
        intermediate=whole(vision, "intermediate_size"),
        approximate=ACTIVATIONS[activation],
        patch=whole(vision, "patch_size"),
        merge=whole(vision, "spatial_merge_size"),
        frames=whole(vision, "temporal_patch_size"),
        side=isqrt(positions),
        theta=_theta(vision),
        out_hidden=hidden_size,
        deepstack=_deepstack(vision, depth, layers if deepstack else 0),
        image_token=_token(config, "image_token_id", vocab_size),
        video_token=_token(config, "video_token_id", vocab_size),
    )


def with_processors(vision: VisionConfig, processors: Mapping[str, tuple[str, Json]]) -> VisionConfig:
    """The same with the pixels' scale of the settings of the `image_processor` and the `video_processor`, each with its file.

    They must agree with each other and the tower.

    Raises UnsupportedModel naming the file and the field.
    """
    scale: PixelScale | None = None
    for part, (file, settings) in processors.items():
        for field, size in (("patch_size", vision.patch), ("merge_size", vision.merge), ("temporal_patch_size", vision.frames)):
            if settings.get(field, size) != size:
                raise UnsupportedModel(f"{file}: {field} = {settings[field]!r}, but the vision tower has {size}")
        said = _scale(file, settings, UNNAMED[part])
        if scale is not None and said != scale:
            raise UnsupportedModel(f"{file}: scales pixels by {said}, images by {scale}; one scale for both is supported")
        scale = said
    return replace(vision, scale=scale or PixelScale())


def _scale(file: str, settings: Json, unnamed: PixelScale) -> PixelScale:
    """Rescaling and normalisation, each of which the settings may turn off."""
    factor = settings.get("rescale_factor", unnamed.rescale)
    if not _numbers([factor]):
        raise UnsupportedModel(f"{file}: rescale_factor = {factor!r} is not a positive number")
    mean, std = settings.get("image_mean") or unnamed.mean, settings.get("image_std") or unnamed.std
    for field, values in (("image_mean", mean), ("image_std", std)):
        if not isinstance(values, list | tuple) or len(values) != CHANNELS or not _numbers(values, zero=field == "image_mean"):
            raise UnsupportedModel(
                f"{file}: {field} = {values!r} is not supported; supported: three numbers, a standard deviation above 0"
            )
    normalised = settings.get("do_normalize", True)
    return PixelScale(
        rescale=float(factor) if settings.get("do_rescale", True) else 1.0,
        mean=tuple(map(float, mean)) if normalised else (0.0,) * CHANNELS,
        std=tuple(map(float, std)) if normalised else (1.0,) * CHANNELS,
    )


def _numbers(values: Any, *, zero: bool = False) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) and (zero or value > 0) for value in values)


def _theta(vision: Json) -> float:
    rope = vision.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") != "axial":
        raise refuse("vision_config.rope_parameters.rope_type", rope["rope_type"], "axial")
    return real(rope, "rope_theta", 10_000.0)


def _deepstack(vision: Json, depth: int, most: int) -> tuple[int, ...]:
    """Block numbers in ascending order, at most one for each of `most` layers."""
    blocks = vision.get("deepstack_visual_indexes") or []
    known = isinstance(blocks, list) and all(isinstance(block, int) and 0 <= block < depth for block in blocks)
    if not known or sorted(set(blocks)) != blocks or len(blocks) > most:
        raise refuse("vision_config.deepstack_visual_indexes", blocks, f"at most {most} block numbers below {depth}, ascending")
    return tuple(blocks)


def _token(config: Json, field: str, vocab_size: int) -> int:
    if config.get(field) is None:
        raise UnsupportedModel(f"config.json has no {field}")
    token = count(config, field)
    if token >= vocab_size:
        raise refuse(field, token, f"a token id below vocab_size = {vocab_size}")
    return token
