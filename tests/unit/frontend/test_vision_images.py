"""Decoded images are transformers' to the byte; what cannot be decoded says why."""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.images import decode_image
from ep_runtime.frontend.vision.rules import ImageRules
from tests.support.media import encoded, picture, reference_pixels

CUT = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}
REAL = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 262144}}


def rules_of(cut: dict[str, Any], resample: int = 3) -> ImageRules:
    size = cut["size"]
    bounds = {"shortest": size["shortest_edge"], "longest": size["longest_edge"]}
    return ImageRules(patch=cut["patch_size"], merge=cut["merge_size"], resample=resample, **bounds)


def decoded_pixels(data: bytes, cut: dict[str, Any] = CUT, resample: int = 3) -> np.ndarray:
    (grid,) = decode_image(data, None, rules_of(cut, resample)).grids
    unit = cut["patch_size"] * cut["merge_size"]
    shape = (grid.height * unit, grid.width * unit, 3)
    assert grid.frames == 1
    assert grid.digest(unit) == hashlib.blake2b(struct.pack("<3I", 1, *shape[:2]) + grid.pixels, digest_size=32).digest()
    return np.frombuffer(grid.pixels, np.uint8).reshape(shape)


def transparent() -> Image.Image:
    """RGBA whose hidden colours differ from its background."""
    image = picture(50, 40, "RGBA")
    image.putalpha(picture(50, 40, "L", seed=3))
    return image


def palette(**options: Any) -> bytes:
    return encoded(picture(60, 30).quantize(30), "PNG", transparency=bytes([0, 255, 128]), **options)


def turned(orientation: int, kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture(61, 33), kind, exif=exif)


GOOD = {
    "png": encoded(picture(70, 45)),
    "jpeg": encoded(picture(70, 45), "JPEG", quality=80),
    "progressive jpeg": encoded(picture(70, 45), "JPEG", progressive=True),
    "cmyk jpeg": encoded(picture(70, 45, "CMYK"), "JPEG"),
    "grey jpeg": encoded(picture(70, 45, "L"), "JPEG"),
    "webp": encoded(picture(70, 45), "WEBP"),
    "lossless webp with alpha": encoded(transparent(), "WEBP", lossless=True),
    "gif": encoded(picture(70, 45), "GIF"),
    "bmp": encoded(picture(70, 45), "BMP"),
    "rgba": encoded(transparent()),
    "grey and alpha": encoded(transparent().convert("LA")),
    "palette with transparency": palette(),
    "one bit": encoded(picture(70, 45, "1")),
    "interlaced": encoded(picture(70, 45), "PNG", interlace=1),
    **{f"exif {orientation} in {kind}": turned(orientation, kind) for orientation in (1, 3, 6, 8) for kind in ("JPEG", "PNG")},
    "tiny": encoded(picture(1, 1)),
    "narrow": encoded(picture(2, 400)),
    "wide": encoded(picture(900, 5)),
    "large": encoded(picture(640, 480)),
    "two pictures of a phone": encoded(picture(40, 40), "MPO", save_all=True, append_images=[picture(20, 20, seed=2)]),
}


@pytest.mark.parametrize("name", GOOD)
def test_pixels_are_those_of_transformers(name: str) -> None:
    assert np.array_equal(decoded_pixels(GOOD[name]), reference_pixels(GOOD[name], CUT))


def test_the_published_settings_and_other_filters() -> None:
    data = encoded(picture(700, 500))
    assert np.array_equal(decoded_pixels(data, REAL), reference_pixels(data, REAL))
    assert np.array_equal(decoded_pixels(data, CUT, 2), reference_pixels(data, {**CUT, "resample": 2}))
    assert not np.array_equal(decoded_pixels(data, CUT, 2), decoded_pixels(data, CUT, 3))


def test_sixteen_bits_of_grey_are_scaled() -> None:
    grey = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
    pixels = decoded_pixels(encoded(Image.fromarray(grey), "PNG"))
    assert pixels.shape == (64, 64, 3)
    assert np.abs(pixels[..., 1] - grey / 257).max() <= 1


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, rows: bytes = b"\0" * 100) -> bytes:
    """A PNG whose header claims this size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def animation(kind: str) -> bytes:
    return encoded(picture(20, 20), kind, save_all=True, append_images=[picture(20, 20, seed=1)])


def gif_of_size(width: int, height: int) -> bytes:
    data = bytearray(encoded(picture(20, 20), "GIF"))
    struct.pack_into("<HH", data, 6, width, height)
    return bytes(data)


JPEG = encoded(picture(200, 200), "JPEG")
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "none of the formats that the server reads: PNG, JPEG, WEBP, GIF, BMP"),
    "text": (b"hello", "none of the formats"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of the formats"),
    "tiff": (encoded(picture(20, 20), "TIFF"), "none of the formats"),
    "icon": (encoded(picture(32, 32), "ICO"), "none of the formats"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "none of the formats"),
    "0 wide": (png(0, 10), "has 0 x 10 pixels"),
    "0 high": (png(10, 0), "has 10 x 0 pixels"),
    "10,000 wide": (png(10_000, 100), "has 10000 x 100 pixels; a side may have 8192"),
    "bomb": (png(8000, 8000), "64000000 in all; the server decodes 40000000"),
    "bomb of 4 GPixel": (png(2**31 - 1, 2**31 - 1), "a side may have 8192"),
    "gif bomb": (gif_of_size(65535, 65535), "has 65535 x 65535"),
    "zip bomb": (png(4000, 4000), "cannot be decoded|damaged"),
    "long and thin": (encoded(picture(1005, 5)), "200 times the other"),
    "truncated jpeg": (JPEG[: len(JPEG) // 2], "truncated"),
    "truncated png": (GOOD["png"][:400], "cannot be decoded|truncated"),
    "truncated webp": (GOOD["webp"][:200], "damaged|cannot be decoded"),
    "png header alone": (GOOD["png"][:8], "damaged"),
    "jpeg marker alone": (b"\xff\xd8\xff", "damaged"),
    "bad checksum": (GOOD["png"].replace(b"IDAT", b"IDAX", 1), "damaged|cannot be decoded"),
    "animated gif": (animation("GIF"), "animated GIF"),
    "animated webp": (animation("WEBP"), "animated WEBP"),
    "animated png": (animation("PNG"), "animated PNG"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_says_why(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(MediaError, match=message):
        decode_image(data, None, rules_of(CUT))


@pytest.mark.parametrize(("media_type", "right"), [("image/png", True), ("image/jpeg", False), ("video/mp4", False)])
def test_the_media_type_must_be_the_contents(media_type: str, right: bool) -> None:
    if right:
        assert decode_image(GOOD["png"], media_type, rules_of(CUT)).grids
        return
    with pytest.raises(MediaError, match=f"is a PNG file, but its media type is {media_type}"):
        decode_image(GOOD["png"], media_type, rules_of(CUT))


def test_equal_pixels_have_equal_digests_whatever_the_file() -> None:
    image = picture(64, 64)
    files = [encoded(image), encoded(image, "BMP"), encoded(image, "WEBP", lossless=True)]
    rules = rules_of(CUT)
    digests = {decode_image(data, None, rules).grids[0].digest(rules.unit) for data in files}
    assert len(digests) == 1
    other = io.BytesIO(encoded(picture(64, 64, seed=1)))
    assert decode_image(other.getvalue(), None, rules).grids[0].digest(rules.unit) not in digests
