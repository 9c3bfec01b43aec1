"""Where images and videos stand in a prompt: times of video groups in its text, and as many placeholder tokens as rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.jobs import Grid
from ep_runtime.frontend.vision.settings import Placeholders
from protocol.messages import VisionInput


def check_literals(texts: Iterable[tuple[str, str]], marks: Placeholders) -> None:
    """Raise MediaError naming the first text (where it stands, and itself) that contains a placeholder."""
    for where, text in texts:
        for mark in (marks.image, marks.video):
            if mark in text:
                raise MediaError(f"{where} contains {mark!r}, which stands for an image or video and cannot be written")


def check_counts(text: str, images: int, videos: int, marks: Placeholders) -> None:
    """Raise MediaError unless the rendered text has one placeholder for each image and video."""
    for name, mark, count in (("images", marks.image, images), ("videos", marks.video, videos)):
        found = text.count(mark)
        if found != count:
            reason = "it takes none in a message of this role" if found < count else f"{mark!r} cannot be written in a message"
            raise MediaError(f"the chat template has {found} placeholders for {count} {name}: {reason}")


def write_times(text: str, videos: Sequence[Sequence[float]], marks: Placeholders) -> str:
    """The text with each video's placeholder replaced by one of its own for each group, behind the group's time in seconds.

    As transformers' processor of these families: only the placeholder is replaced, so that a template's own start and end marks
    stay around the whole.
    """
    first, *rest = text.split(marks.video)
    pieces = [first]
    for seconds, behind in zip(videos, rest, strict=True):
        pieces += [f"<{time:.1f} seconds>{marks.start}{marks.video}{marks.end}" for time in seconds]
        pieces.append(behind)
    return "".join(pieces)


def expand(
    ids: Sequence[int], images: Sequence[Grid], groups: Sequence[Grid], marks: Placeholders, unit: int
) -> tuple[list[int], list[VisionInput]]:
    """The prompt with each placeholder token repeated for every row of its grid, and what stands where.

    `images` and `groups` (of videos) are in prompt order, a row has `unit` pixels a side. It takes a second a gigabyte, for the
    digests. Raises MediaError when the tokens do not pair with them.
    """
    left = {marks.image_id: iter(images), marks.video_id: iter(groups)}
    expanded: list[int] = []
    inputs: list[VisionInput] = []
    for token in ids:
        if token not in left:
            expanded.append(token)
            continue
        grid = next(left[token], None)
        if grid is None:
            raise MediaError("the prompt has more placeholders than images")
        inputs.append(
            VisionInput(
                start=len(expanded),
                height=grid.height,
                width=grid.width,
                frames=grid.frames,
                digest=grid.digest(unit),
                pixels=grid.pixels,
            )
        )
        expanded += [token] * grid.rows
    if any(next(grids, None) is not None for grids in left.values()):
        raise MediaError("the prompt has fewer placeholders than images")
    return expanded, inputs
