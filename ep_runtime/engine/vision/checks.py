"""What a request may show the model: checked once at submission, so that no image can fail inside a step, beside others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.vision import DIGEST_BYTES

if TYPE_CHECKING:
    from model.spec import VisionSpec
    from protocol.messages import Submit, VisionInput


def images_fault(message: Submit, spec: VisionSpec | None) -> str | None:
    """Why this request's images and its prompt do not fit together (the text of a 400), or None. `spec` None: no vision.

    Every placeholder token of the prompt belongs to one image, and every position of an image is a placeholder token.
    """
    if spec is None:
        return "images: this model takes none" if message.images else None
    end = 0
    for number, image in enumerate(message.images):
        fault = _size_fault(image, spec) or _place_fault(image, message.prompt, end, spec)
        if fault is not None:
            return f"images: image {number} {fault}"
        end = image.start + image.rows
    placeholders = sum(message.prompt.count(token) for token in spec.placeholders)
    rows = sum(image.rows for image in message.images)
    if placeholders != rows:
        return f"prompt has {placeholders} placeholder tokens of images, and its images {rows} rows: an image is missing"
    return None


def _size_fault(image: VisionInput, spec: VisionSpec) -> str | None:
    unit = spec.patch * spec.merge
    if image.frames not in (1, spec.frames):
        return f"has {image.frames} frames; an image has 1, a group of a video's frames {spec.frames}"
    expected = image.frames * image.rows * unit * unit * 3
    if len(image.pixels) != expected:
        return f"of {image.height} x {image.width} rows has {len(image.pixels)} bytes of pixels, not {expected}"
    if len(image.digest) != DIGEST_BYTES:
        return f"has a digest of {len(image.digest)} bytes, not {DIGEST_BYTES}"
    return None


def _place_fault(image: VisionInput, prompt: list[int], end: int, spec: VisionSpec) -> str | None:
    stop = image.start + image.rows
    if image.start < end:
        return f"starts at {image.start}, the one before it ends at {end}"
    if stop > len(prompt):
        return f"reaches to position {stop}, the prompt has {len(prompt)} tokens"
    here = prompt[image.start : stop]
    if sum(here.count(token) for token in spec.placeholders) != image.rows:
        return f"at positions {image.start} to {stop - 1} does not stand on placeholder tokens alone"
    return None
