"""Time to the first token of an image that is new, of one that was encoded before, and of a text of as many tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ep_runtime.bench.session import Session
from ep_runtime.bench.vision_encoder import Size
from ep_runtime.bench.vision_traffic import Maker, Request, Traffic

COLUMNS = {
    "size": "size",
    "tokens": "tokens",
    "new_ms": "new image ms",
    "known_ms": "known image",
    "text_ms": "text alone",
    "saved_ms": "saved",
    "encoding_share": "encoder's share",
}


def measure(session: Session, maker: Maker, size: Size, repeats: int) -> dict[str, Any]:
    """One row: medians of `repeats` of each, in turn and with nothing beside them, after one that is not counted."""
    traffic = Traffic(session.llm)
    times: dict[str, list[float]] = {"new": [], "known": [], "text": []}
    for _ in range(repeats + 1):
        new = maker.image(size)
        known, text = maker.again(new), maker.text(len(new.prompt))
        for name, request in (("new", new), ("known", known), ("text", text)):
            check_known(session, request, known=name == "known")
            track = traffic.submit(request, 1)
            traffic.finish([track])
            times[name].append(track.first_ms)
    new_ms, known_ms, text_ms = (statistics.median(values[1:]) for values in times.values())
    return {
        "size": f"{size[0]}x{size[1]}",
        "tokens": len(new.prompt),
        "new_ms": new_ms,
        "known_ms": known_ms,
        "text_ms": text_ms,
        "saved_ms": new_ms - known_ms,
        "encoding_share": (new_ms - known_ms) / new_ms,
        "all_ms": {name: [round(value, 3) for value in values[1:]] for name, values in times.items()},
    }


def check_known(session: Session, request: Request, *, known: bool) -> None:
    """RuntimeError unless the head's cache has the images of a request, or has none of them, as it should."""
    cache = session.llm.encoded
    digests: Sequence[bytes] = [image.digest for image in request.images]
    if cache is None or any((digest in cache) != known for digest in digests):
        raise RuntimeError(f"an image is {'not ' if known else ''}among the encoded ones before its request")
