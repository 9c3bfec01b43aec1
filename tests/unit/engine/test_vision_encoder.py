"""The head's encoder with a tower that computes nothing: slices, passes, failures, and the cache that it fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from ep_runtime.engine.vision import encoder as encoder_module
from ep_runtime.engine.vision.cache import EncodedImages
from ep_runtime.engine.vision.encoder import ImageEncoder, WantedImage
from ep_runtime.engine.vision.inputs import vision_input
from ep_runtime.engine.vision.pixels import PixelUpload
from model.errors import BatchError
from model.spec import VisionSpec
from model.vision.patches import ImagePixels
from protocol.errors import EpCommandFailed

SPEC = VisionSpec(placeholders=(7,), patch=2, merge=2, frames=2, row_width=3)
DEPTH = 4
ROW_BYTES = SPEC.row_width * 4


@dataclass
class FakeEncoding:
    images: list[ImagePixels]
    done: int = 0

    @property
    def remaining_layers(self) -> int:
        return DEPTH - self.done


@dataclass
class FakeTower:
    """A row of an image is its first pixel's value three times. A block of an image costs its rows."""

    calls: list[Any] = field(default_factory=list)
    fault: Callable[[str, list[int]], None] = lambda call, values: None

    def begin(self, images: Sequence[ImagePixels]) -> FakeEncoding:
        for image in images:
            assert image.pixels.dtype == torch.uint8
            assert tuple(image.pixels.shape) == (image.frames, 4 * image.height, 4 * image.width, 3)
        self._call("begin", images)
        return FakeEncoding(list(images))

    def advance(self, encoding: FakeEncoding, layers: int) -> bool:
        encoding.done = min(DEPTH, encoding.done + layers)
        self._call(layers, encoding.images)
        return encoding.remaining_layers == 0

    def rows(self, encoding: FakeEncoding) -> list[torch.Tensor]:
        assert encoding.done == DEPTH
        self._call("rows", encoding.images)
        return [torch.full((i.height * i.width, 3), float(i.pixels.flatten()[0])) for i in encoding.images]

    def layer_cost(self, images: Sequence[Any]) -> float:
        return float(sum(image.height * image.width for image in images))

    def _call(self, call: str | int, images: Sequence[ImagePixels]) -> None:
        values = [int(image.pixels.flatten()[0]) for image in images]
        self.calls.append((call, values))
        self.fault(str(call), values)


def wanted(value: int, rows: int = 1, request: str = "", alone: bool = False) -> WantedImage:
    image = vision_input(0, np.full((1, 4, 4 * rows, 3), value, np.uint8), SPEC)
    return WantedImage(request or f"r{value}", image, alone)


@dataclass
class Bench:
    tower: FakeTower
    encoder: ImageEncoder
    offered: list[torch.Tensor]

    def finish(self) -> list:
        failures = []
        while self.encoder.busy:
            assert self.encoder.ready()
            failures += self.encoder.advance()
        assert self.encoder.done()
        return failures


def bench(*, slice_cost: float = 100.0, pass_rows: int = 10, cache_rows: int = 20) -> Bench:
    tower, offered = FakeTower(), []
    cache = EncodedImages(cache_rows * ROW_BYTES, ROW_BYTES)
    encoder = ImageEncoder(
        tower,  # type: ignore[arg-type]
        SPEC,
        cache,
        torch.device("cpu"),
        slice_cost=slice_cost,
        pass_rows=pass_rows,
        offer=offered.append,
    )
    return Bench(tower, encoder, offered)


@pytest.mark.parametrize(
    ("cost", "slices"), [(2.0, [1, 1, 1, 1]), (4.0, [2, 2]), (7.0, [3, 3]), (0.5, [1, 1, 1, 1]), (1e9, [10**9])]
)
def test_a_slice_costs_what_it_may(cost: float, slices: list[int]) -> None:
    b = bench(slice_cost=cost)
    b.encoder.begin([wanted(5, rows=2)])
    turns = 0
    while b.encoder.busy:
        assert wanted(5, rows=2).image.digest not in b.encoder.cache
        assert b.encoder.advance() == []
        turns += 1
    assert [call for call, _ in b.tower.calls] == ["begin", *[int(cost // 2) or 1 for _ in slices], "rows"]
    assert turns == len(slices) + 2, "one call of the tower a turn"
    assert torch.equal(b.encoder.cache.rows(wanted(5, rows=2).image.digest), torch.full((2, 3), 5.0))


def test_a_pass_has_images_of_several_requests_within_rows_and_cost() -> None:
    b = bench(pass_rows=6)
    images = [wanted(n, rows=2) for n in range(5)]
    b.encoder.begin(images)
    assert b.encoder.requests == ["r0", "r1", "r2"]
    b.finish()
    b.encoder.begin(images)
    b.finish()
    b.encoder.begin(images)
    assert not b.encoder.busy
    assert [values for call, values in b.tower.calls if call == "begin"] == [[0, 1, 2], [3, 4]]
    b = bench(slice_cost=5.0)
    b.encoder.begin(images)
    assert b.encoder.requests == ["r0", "r1"], "two cost 4 a block, three 6"
    b = bench(slice_cost=1.0, pass_rows=1)
    b.encoder.begin(images)
    assert b.encoder.requests == ["r0"], "the first one goes whatever it costs"
    b = bench(pass_rows=1000, cache_rows=1000)
    b.encoder.begin([wanted(n) for n in range(40)])
    assert b.encoder.requests == [f"r{n}" for n in range(32)], "each size has launches of its own"


def test_pixels_go_to_the_device_in_pieces() -> None:
    """Of 100 bytes, which end in the midst of images of 48, 144 and 48."""
    images = [wanted(1), wanted(2, rows=3), wanted(3)]
    upload = PixelUpload([one.image for one in images], 4, torch.device("cpu"), piece_bytes=100)
    assert [upload.advance() for _ in range(3)] == [False, False, True]
    for one, moved in zip(images, upload.pixels(), strict=True):
        assert (moved.frames, moved.height, moved.width) == (1, one.image.height, one.image.width)
        assert moved.pixels.numpy().tobytes() == one.image.pixels


def test_nothing_is_embedded_before_all_pixels_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "PixelUpload", lambda *given: PixelUpload(*given, piece_bytes=100))
    b = bench()
    b.encoder.begin([wanted(1), wanted(2, rows=3), wanted(3)])
    calls = []
    while b.encoder.busy:
        assert b.encoder.advance() == []
        calls.append(len(b.tower.calls))
    assert calls == [0, 0, 1, 2, 3], "two slices copy pixels alone"
    assert b.tower.calls[0] == ("begin", [1, 2, 3])
    assert torch.equal(b.encoder.cache.rows(wanted(3).image.digest), torch.full((1, 3), 3.0))


def test_a_suspect_shares_a_pass_with_nobody() -> None:
    b = bench()
    images = [wanted(0, request="s", alone=True), wanted(1), wanted(2, request="s", alone=True), wanted(3, alone=True)]
    for expected in (["s"], ["r1"], ["r3"]):
        b.encoder.begin(images)
        assert b.encoder.requests == expected
        assert b.encoder.suspect == ("" if expected == ["r1"] else expected[0])
        b.finish()
    assert [values for call, values in b.tower.calls if call == "begin"] == [[0, 2], [1], [3]]
    assert b.encoder.suspect == ""


def test_images_of_a_pass_that_fails_are_tried_singly() -> None:
    def fault(call: str, values: list[int]) -> None:
        if call not in ("begin", "rows") and 1 in values:
            raise MemoryError("no memory")

    b = bench(slice_cost=3.0)
    b.tower.fault = fault
    images = [wanted(0), wanted(1), wanted(2)]
    b.encoder.begin(images)
    assert b.finish() == []
    assert len(b.encoder.cache) == 0
    failures = []
    for _ in range(3):
        b.encoder.begin(images)
        assert len(b.encoder.requests) == 1
        failures += b.finish()
        images = [image for image in images if image.request_id not in [f.request_id for f in failures]]
    (failure,) = failures
    assert (failure.request_id, failure.status) == ("r1", 500)
    assert "no memory" in failure.message
    assert "position 0, of 1 x 1 tokens" in failure.message
    b.encoder.begin(images)
    assert not b.encoder.busy
    # They are known to go together again once they have gone alone, or nobody wants them.
    b.encoder.begin([wanted(1), wanted(4)])
    assert b.encoder.requests == ["r1", "r4"]


@pytest.mark.parametrize(
    ("call", "error", "status"),
    [
        ("begin", BatchError("pixels of another size"), 400),
        ("begin", ValueError("odd"), 400),
        ("begin", RuntimeError("odd"), 500),
        ("rows", BatchError("odd"), 500),
        ("rows", torch.OutOfMemoryError("CUDA out of memory"), 500),
    ],
)
def test_what_is_wrong_with_one_image_is_its_requests_answer(call: str, error: Exception, status: int) -> None:
    def fault(at: str, values: list[int]) -> None:
        if at == call:
            raise error

    b = bench()
    b.tower.fault = fault
    b.encoder.begin([wanted(3)])
    (failure,) = b.finish()
    assert (failure.request_id, failure.status) == ("r3", status)
    assert str(error) in failure.message
    assert not b.encoder.busy
    b.encoder.check_integrity()


def test_an_error_of_the_device_is_nobodys_answer() -> None:
    def fault(at: str, values: list[int]) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    b = bench()
    b.tower.fault = fault
    b.encoder.begin([wanted(3), wanted(4)])
    with pytest.raises(RuntimeError, match="CUDA error"):
        b.encoder.advance()


def test_a_pass_that_nobody_waits_for_is_dropped() -> None:
    b = bench()
    b.encoder.drop()
    b.encoder.begin([wanted(3)])
    b.encoder.advance()
    b.encoder.drop()
    assert (b.encoder.busy, b.encoder.requests, len(b.encoder.cache)) == (False, [], 0)
    b.encoder.begin([wanted(3)])
    assert b.finish() == []


def test_rows_are_offered_in_the_order_asked_for() -> None:
    b = bench()
    images = [wanted(n, rows=n) for n in (1, 2, 3)]
    b.encoder.begin(images)
    b.finish()
    b.encoder.offer([])
    assert b.offered == []
    b.encoder.offer([images[2].image.digest, images[0].image.digest])
    assert b.offered[0][:, 0].tolist() == [3.0, 3.0, 3.0, 1.0]


def test_no_memory_for_an_offer_is_a_failed_command(monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench()
    b.encoder.begin([wanted(1)])
    b.finish()

    def no_room(*args: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "cat", no_room)
    with pytest.raises(EpCommandFailed, match="out of memory for the rows of 1 images"):
        b.encoder.offer([wanted(1).image.digest])
    assert b.offered == []


# The cache


def rows(count: int) -> torch.Tensor:
    return torch.zeros(count, 3)


def test_the_cache_is_bounded_and_drops_what_was_used_longest_ago() -> None:
    cache = EncodedImages(10 * ROW_BYTES + 5, ROW_BYTES)
    assert cache.capacity_rows == 10
    for name, count in ((b"a", 4), (b"b", 3), (b"c", 3)):
        cache.put(name, rows(count))
        cache.check_integrity()
    cache.rows(b"a")
    cache.put(b"d", rows(1))
    assert [name in cache for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    cache.put(b"d", rows(2))
    assert (cache.held_rows, len(cache)) == (9, 3)
    cache.put(b"e", rows(10))
    assert (cache.held_rows, len(cache)) == (10, 1)
    for bad in (torch.zeros(11, 3), torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.float64)):
        with pytest.raises(ValueError, match="rows of"):
            cache.put(b"f", bad)
    assert cache.held_rows == 10
    cache.check_integrity()


def test_what_is_needed_next_is_dropped_last() -> None:
    cache = EncodedImages(6 * ROW_BYTES, ROW_BYTES)
    for name in (b"a", b"b", b"c", b"d", b"e", b"f"):
        cache.put(name, rows(1))
    cache.keep([b"b", b"x", b"a"])
    for number, gone in enumerate((b"c", b"d", b"e", b"f", b"a", b"b")):
        cache.put(bytes([number]), rows(1))
        assert gone not in cache


def test_the_caches_books_see_damage() -> None:
    cache = EncodedImages(6 * ROW_BYTES, ROW_BYTES)
    cache.put(b"a", rows(5)[:2])
    with pytest.raises(ValueError, match="not alone in its memory"):
        cache.check_integrity()
    cache = EncodedImages(6 * ROW_BYTES, ROW_BYTES)
    cache.put(b"a", rows(2))
    cache._held = 3
    with pytest.raises(ValueError, match="have 2 rows, books say 3 of 6"):
        cache.check_integrity()
