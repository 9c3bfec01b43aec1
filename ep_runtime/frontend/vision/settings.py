"""What a model's folder says of its images and videos: the tokens that stand for them, and how they are cut to size."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ep_runtime.frontend.text.errors import TextError
from ep_runtime.frontend.text.folder import read_json
from ep_runtime.frontend.text.tokenizer import Tokenizer
from ep_runtime.frontend.vision.rules import ImageRules, VideoRules

log = logging.getLogger(__name__)
IMAGE_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
VIDEO_PROCESSORS = ("Qwen3VLVideoProcessor",)
T = TypeVar("T", bound=BaseModel)
Pixels = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placeholders:
    """The tokens around and in the place of images and videos: their texts, and the ids of the two that are repeated."""

    image: str
    video: str
    start: str
    end: str
    image_id: int
    video_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSettings:
    """Of one model. `video` is None for one whose folder does not say how videos are cut."""

    placeholders: Placeholders
    image: ImageRules
    video: VideoRules | None


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Size(_File):
    shortest_edge: Pixels | None = None
    longest_edge: Pixels | None = None


class _Cut(_File):
    """The fields of a processor's file that both kinds have. Other settings (mean, std) are the encoder's affair."""

    patch_size: Pixels
    merge_size: Pixels
    temporal_patch_size: Pixels
    size: _Size = _Size()
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    resample: int = Field(default=3, ge=0, le=5)
    do_resize: bool = True
    do_convert_rgb: bool = True

    def bounds(self) -> tuple[int, int] | None:
        """Least and most pixels; the older two fields go before `size`."""
        least, most = self.min_pixels or self.size.shortest_edge, self.max_pixels or self.size.longest_edge
        return None if least is None or most is None else (least, most)


class _VideoCut(_Cut):
    fps: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    num_frames: None = None
    min_frames: int = Field(default=4, ge=1)
    max_frames: int = Field(default=768, ge=1)
    do_sample_frames: bool = True
    cap_pixels_per_frame: bool | None = None
    max_video_tokens: int = Field(default=768, ge=1)


class _VisionConfig(_File):
    patch_size: int
    spatial_merge_size: int
    temporal_patch_size: int


class _ModelConfig(_File):
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    vision_config: _VisionConfig


def load_vision(folder: Path, tokenizer: Tokenizer, *, max_image_pixels: int, max_video_pixels: int) -> VisionSettings | None:
    """The settings of the model in `folder`, its bounds lowered to the server's; None when it takes text alone.

    A folder whose files are of a kind that is not known, or absent, takes text alone as well, and the log says why. Raises
    TextError for files that cannot be read or contradict each other.
    """
    config = read_json(folder / "config.json") or {}
    if not isinstance(config.get("vision_config"), dict):
        return None
    image_file = _processor_file(folder, "image_processor", "preprocessor_config.json")
    if image_file is None or image_file[1].get("image_processor_type") not in (None, *IMAGE_PROCESSORS):
        found = "no preprocessor_config.json" if image_file is None else image_file[1].get("image_processor_type")
        log.warning("no images: %s has %s; known are %s", folder, found, ", ".join(IMAGE_PROCESSORS))
        return None
    model = _parse(_ModelConfig, folder / "config.json", config)
    return VisionSettings(
        placeholders=_placeholders(folder, model, tokenizer),
        image=_image_rules(*image_file, model.vision_config, max_image_pixels),
        video=_video_rules(folder, model.vision_config, max_video_pixels),
    )


def _image_rules(path: Path, found: dict[str, Any], vision: _VisionConfig, most: int) -> ImageRules:
    cut = _parse(_Cut, path, found)
    shortest, longest = _checked(path, cut, vision)
    return ImageRules(
        patch=cut.patch_size,
        merge=cut.merge_size,
        shortest=min(shortest, most),
        longest=min(longest, most),
        resample=cut.resample,
    )


def _video_rules(folder: Path, vision: _VisionConfig, most: int) -> VideoRules | None:
    file = _processor_file(folder, "video_processor", "video_preprocessor_config.json")
    if file is None or file[1].get("video_processor_type") not in (None, *VIDEO_PROCESSORS):
        log.warning("no videos: %s has no video_preprocessor_config.json of a known processor", folder)
        return None
    cut = _parse(_VideoCut, *file)
    shortest, longest = _checked(file[0], cut, vision)
    if not cut.do_sample_frames:
        raise TextError(f"{file[0]}: do_sample_frames is false, which is not served")
    return VideoRules(
        patch=cut.patch_size,
        merge=cut.merge_size,
        group=cut.temporal_patch_size,
        shortest=min(shortest, most),
        longest=min(longest, most),
        resample=cut.resample,
        fps=cut.fps,
        min_frames=cut.min_frames,
        max_frames=cut.max_frames,
        frame_tokens=cut.max_video_tokens if cut.cap_pixels_per_frame else None,
    )


def _processor_file(folder: Path, part: str, name: str) -> tuple[Path, dict[str, Any]] | None:
    """Settings of a processor: nested in processor_config.json, else in a file of its own, as transformers looks for them."""
    nested = (read_json(folder / "processor_config.json") or {}).get(part)
    if isinstance(nested, dict):
        return folder / "processor_config.json", nested
    found = read_json(folder / name)
    return None if found is None else (folder / name, found)


def _checked(path: Path, cut: _Cut, vision: _VisionConfig) -> tuple[int, int]:
    """The bounds on pixels, once the file agrees with the model."""
    mine = (cut.patch_size, cut.merge_size, cut.temporal_patch_size)
    models = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    if mine != models:
        raise TextError(f"{path}: patch, merge and temporal patch size are {mine}, but {models} in config.json")
    if not (cut.do_resize and cut.do_convert_rgb):
        raise TextError(f"{path}: do_resize or do_convert_rgb is false, which is not served")
    bounds = cut.bounds()
    if bounds is None or bounds[0] > bounds[1]:
        raise TextError(f"{path}: size needs shortest_edge and longest_edge, the former not above the latter")
    return bounds


def _placeholders(folder: Path, model: _ModelConfig, tokenizer: Tokenizer) -> Placeholders:
    ids = (model.image_token_id, model.video_token_id, model.vision_start_token_id, model.vision_end_token_id)
    image, video, start, end = (tokenizer.token_text(token) for token in ids)
    for token, text in zip(ids, (image, video, start, end), strict=True):
        if token not in tokenizer.special_ids or tokenizer.encode(text, add_special_tokens=False) != [token]:
            raise TextError(f"{folder / 'config.json'}: the vision token {token} is no special token of the tokenizer")
    return Placeholders(image=image, video=video, start=start, end=end, image_id=ids[0], video_id=ids[1])


def _parse(kind: type[T], path: Path, found: dict[str, Any]) -> T:
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise TextError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
