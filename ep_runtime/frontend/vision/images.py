"""Decodes one image. Runs in a decoding process: whatever a file does to the library, it does it there."""

from __future__ import annotations

import io
import struct
import warnings

from PIL import (  # the plugins register themselves, and none can be imported later: see `child`
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.jobs import Decoded, Grid
from ep_runtime.frontend.vision.rules import ImageRules
from ep_runtime.frontend.vision.sizes import check_source_size, image_size

PLUGINS = (BmpImagePlugin, GifImagePlugin, JpegImagePlugin, MpoImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin)
MEDIA_TYPES = {
    "PNG": ("image/png",),
    "JPEG": ("image/jpeg", "image/jpg"),
    "WEBP": ("image/webp",),
    "GIF": ("image/gif",),
    "BMP": ("image/bmp", "image/x-ms-bmp"),
}
SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")


def decode_image(data: bytes, media_type: str | None, rules: ImageRules) -> Decoded:
    """One image as RGB of the model's size, upright as its EXIF says. Raises MediaError."""
    kind = sniff(data)
    if kind is None:
        raise MediaError(f"is none of the formats that the server reads: {', '.join(MEDIA_TYPES)}")
    if media_type is not None and media_type not in MEDIA_TYPES[kind]:
        raise MediaError(f"is a {kind} file, but its media type is {media_type}")
    declared = header_size(kind, data)
    if declared is not None:
        check_source_size(*declared)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd files, which nobody reads in this process
            image = upright_rgb(data, kind)
    except MediaError:
        raise
    except UnidentifiedImageError:
        raise MediaError(f"begins like a {kind} file and is damaged") from None
    except MemoryError:
        raise
    except Exception as error:  # a format's reader raises whatever its parsing raises
        raise MediaError(f"is a {kind} file that cannot be decoded: {error}") from error
    height, width = image_size(image.height, image.width, rules)
    pixels = image.resize((width, height), resample=Image.Resampling(rules.resample)).tobytes()
    grid = Grid(height=height // rules.unit, width=width // rules.unit, frames=1, pixels=pixels)
    return Decoded(grids=[grid])


def upright_rgb(data: bytes, kind: str) -> Image.Image:
    """The decoded picture: rotated by its EXIF, in RGB, an alpha channel dropped, as transformers' `load_image` gives it.

    Sixteen bits of grey are scaled to eight (Pillow's own conversion clips them).
    """
    Image.MAX_IMAGE_PIXELS = None  # `check_source_size` is stricter, and says more
    with Image.open(io.BytesIO(data), formats=[kind]) as image:
        check_source_size(*image.size)
        # A phone's JPEG may carry a second picture behind the first (MPO), which is no animation.
        if getattr(image, "is_animated", False) and image.format != "MPO":
            raise MediaError(f"is an animated {kind} file; send a single frame, or a video")
        image.load()
        upright = ImageOps.exif_transpose(image)
    if upright.mode in SIXTEEN_BITS:
        upright = upright.point(lambda value: value * (1 / 257)).convert("L")
    return upright.convert("RGB")


def sniff(data: bytes) -> str | None:
    """The format that a file's first bytes tell."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    return "BMP" if data.startswith(b"BM") else None


def header_size(kind: str, data: bytes) -> tuple[int, int] | None:
    """Width and height where they stand at a fixed place: the library says nothing of a size that it does not like."""
    match kind:
        case "PNG" if data[12:16] == b"IHDR" and len(data) >= 24:
            return struct.unpack_from(">II", data, 16)
        case "GIF" if len(data) >= 10:
            return struct.unpack_from("<HH", data, 6)
        case "BMP" if len(data) >= 26 and struct.unpack_from("<I", data, 14)[0] >= 40:
            width, height = struct.unpack_from("<ii", data, 18)
            return width, abs(height)
    return None
