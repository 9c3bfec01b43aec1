"""Images for a prompt from their pixels, for offline use: what the frontend makes of an upload."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from protocol.messages import VisionInput
from protocol.vision import pixel_digest

if TYPE_CHECKING:
    from model.spec import VisionSpec


def vision_input(start: int, pixels: np.ndarray, spec: VisionSpec) -> VisionInput:
    """An image, or one group of a video's frames, whose first placeholder token is at position `start` of the prompt.

    `pixels` are uint8 RGB `[frames, H, W, 3]`, resized already: H and W are multiples of `spec.patch * spec.merge`, and the prompt
    has a placeholder for each square of that size. Raises ValueError for pixels of any other kind.
    """
    unit = spec.patch * spec.merge
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
        raise ValueError(f"pixels are {pixels.dtype} {list(pixels.shape)}; uint8 [frames, height, width, 3] is due")
    frames, height, width, _ = pixels.shape
    if frames not in (1, spec.frames) or min(height, width) < unit or height % unit or width % unit:
        raise ValueError(
            f"{frames} frames of {height} x {width} pixels; an image has 1 frame, a group of a video's {spec.frames}, and both "
            f"sides are multiples of {unit} pixels"
        )
    data = pixels.tobytes()
    return VisionInput(
        start=start,
        height=height // unit,
        width=width // unit,
        frames=frames,
        digest=pixel_digest((frames, height, width), data),
        pixels=data,
    )
