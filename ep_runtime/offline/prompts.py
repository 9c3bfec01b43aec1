"""The forms in which prompts and their images may be given."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from protocol.messages import VisionInput

Prompt = str | Sequence[int]


def images_of(
    images: Sequence[VisionInput] | Sequence[Sequence[VisionInput]] | None, prompts: int, *, single: bool
) -> list[list[VisionInput]]:
    """The images of each prompt."""
    if images is None:
        return [[] for _ in range(prompts)]
    if single and all(isinstance(image, VisionInput) for image in images):
        return [list(images)]  # type: ignore[arg-type]
    if len(images) != prompts:
        raise ValueError(f"{prompts} prompts, but {len(images)} lists of images")
    return [list(of_one) for of_one in images]  # type: ignore[arg-type]


def plain_ids(prompt: Sequence[int]) -> list[int]:
    """A prompt of one's own: the fast way is for plain ints, the other for all that is like one."""
    try:
        return msgspec.convert(prompt, list[int])
    except msgspec.ValidationError:
        return [int(token) for token in prompt]


def is_ids(prompts: object) -> bool:
    """Whether this is one prompt of token ids, not a sequence of prompts."""
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int)
