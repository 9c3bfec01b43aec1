"""Images and videos for tests, as files and as data URIs, and what transformers' processors make of images."""

from __future__ import annotations

import base64
import fractions
import io
import warnings
from typing import Any

import av
import numpy as np
from PIL import Image
from transformers import Qwen2VLImageProcessorPil
from transformers.image_utils import load_image


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Noise over a gradient, so that neither a shift nor a filter goes unseen."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    base = np.stack([rows * 3 + columns, rows + columns * 2, rows * columns], axis=-1) % 200
    noisy = (base + rng.integers(0, 56, base.shape)).astype(np.uint8)
    return Image.fromarray(noisy).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def data_uri(data: bytes, media_type: str = "image/png") -> str:
    """The data URI of a file."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def reference_pixels(data: bytes, cut: dict[str, Any]) -> np.ndarray:
    """[height, width, 3] uint8: what transformers' processor with the settings `cut` resizes this file to."""
    settings = {name: value for name, value in cut.items() if name != "image_processor_type"}
    processor = Qwen2VLImageProcessorPil(**settings, do_rescale=False, do_normalize=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = load_image(base64.b64encode(data).decode())
    found = processor(image, return_tensors="np")
    _, rows, columns = found["image_grid_thw"][0]
    patch, merge, frames = cut["patch_size"], cut["merge_size"], cut["temporal_patch_size"]
    patches = found["pixel_values"].reshape(rows // merge, columns // merge, merge, merge, 3, frames, patch, patch)
    assert np.array_equal(patches[..., 0, :, :], patches[..., -1, :, :])
    pixels = patches[..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * patch, columns * patch, 3)
    assert np.array_equal(pixels, pixels.astype(np.uint8))
    return pixels.astype(np.uint8)


def video_file(frames: list[Image.Image], rate: int = 10, kind: str = "mp4", codec: str = "mpeg4", **stream: Any) -> bytes:
    """A video of these frames."""
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        video = container.add_stream(codec, rate=fractions.Fraction(rate))
        video.width, video.height = frames[0].size
        video.pix_fmt = "yuv420p"
        for name, value in stream.items():
            setattr(video, name, value)
        for frame in frames:
            container.mux(video.encode(av.VideoFrame.from_image(frame)))
        container.mux(video.encode())
    return out.getvalue()
