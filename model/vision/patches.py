"""From pixels to the values of patches, in the order in which a merger joins them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from model.errors import BatchError
from model.vision.config import CHANNELS, VisionConfig


class Sized(Protocol):
    """What has a size in rows of a prompt."""

    @property
    def height(self) -> int:
        """Rows of its grid."""
        ...

    @property
    def width(self) -> int:
        """Columns of its grid."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePixels:
    """An image (one frame) or a group of a video's frames: `pixels` uint8 `[frames, H, W, 3]`, on any device.

    `height` and `width` count rows of the prompt: H and W are these times `patch * merge`.
    """

    frames: int
    height: int
    width: int
    pixels: torch.Tensor


def patch_count(image: Sized, config: VisionConfig) -> int:
    """Patches that attend to each other: those of a group of frames."""
    return image.height * image.width * config.merge**2


def check_images(images: Sequence[ImagePixels], config: VisionConfig) -> None:
    """Raise BatchError for pixels that are not of the size that they say, or that the tower does not take."""
    for image in images:
        unit = config.patch * config.merge
        expected = (image.frames, image.height * unit, image.width * unit, CHANNELS)
        if image.frames not in (1, config.frames) or min(image.height, image.width) < 1:
            raise BatchError(f"{image.frames} frames of {image.height} x {image.width} rows; a tower takes 1 or {config.frames}")
        if tuple(image.pixels.shape) != expected or image.pixels.dtype != torch.uint8:
            raise BatchError(f"pixels {image.pixels.dtype} {list(image.pixels.shape)} where torch.uint8 {list(expected)} are due")


def patch_values(pixels: torch.Tensor, config: VisionConfig) -> torch.Tensor:
    """uint8 `[images, frames, H, W, 3]` -> float32 `[images * patches, patch_width]`; a single frame is repeated to a group.

    Patches come merged row by merged row, the `merge` x `merge` of one row together; a patch is ordered colour, frame, y, x.
    """
    images, _, height, width, _ = pixels.shape
    p, m = config.patch, config.merge
    grouped = pixels.expand(images, config.frames, height, width, CHANNELS)
    cut = grouped.reshape(images, config.frames, height // (p * m), m, p, width // (p * m), m, p, CHANNELS)
    values = cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, CHANNELS, config.frames * p * p).float()
    values.mul_(config.scale.rescale)
    # By numbers of the host, colour by colour: a tensor made of them would have to wait for the device.
    for colour, mean, std in zip(values.unbind(1), config.scale.mean, config.scale.std, strict=True):
        colour.sub_(mean).div_(std)
    return values.flatten(1)
