"""Decoded videos: which frames, at what times, and their pixels; what cannot be decoded says why."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from PIL import Image

from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.rules import VideoRules
from ep_runtime.frontend.vision.videos import decode_video
from tests.support.media import encoded, picture, video_file

RULES = VideoRules(patch=4, merge=2, group=2, shortest=512, longest=8192, resample=3, fps=2.0, min_frames=4, max_frames=768)
FRAMES = [picture(64, 48, seed=number) for number in range(25)]
MP4 = video_file(FRAMES, 10)
WEBM = video_file(FRAMES[:12], 12, "webm", "libvpx-vp9")


def source_frames(data: bytes) -> list[np.ndarray]:
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_frames_are_taken_evenly_resized_and_grouped() -> None:
    # 25 frames at 10 a second are 5 at 2 a second: 0, 6, 12, 18, 24, and the last again. 5 frames of 64 x 48 have 15360 pixels,
    # rounded to 6 with the group; 8192 allow 40 x 32.
    decoded = decode_video(MP4, "video/mp4", RULES)
    assert [(grid.frames, grid.height * 8, grid.width * 8) for grid in decoded.grids] == [(2, 32, 40)] * 3
    assert decoded.seconds == pytest.approx([0.3, 1.5, 2.4])
    height, width = decoded.grids[0].height * 8, decoded.grids[0].width * 8
    pixels = [np.frombuffer(grid.pixels, np.uint8).reshape(2, height, width, 3) for grid in decoded.grids]
    source = source_frames(MP4)
    for place, index in enumerate([0, 6, 12, 18, 24, 24]):
        wanted = np.asarray(Image.fromarray(source[index]).resize((width, height), Image.Resampling.BICUBIC))
        assert np.array_equal(pixels[place // 2][place % 2], wanted)


def test_a_container_without_a_number_of_frames() -> None:
    decoded = decode_video(WEBM, "video/webm", RULES)
    assert decoded.seconds == pytest.approx([(0 + 4 / 12) / 2, (7 / 12 + 11 / 12) / 2])


def test_few_frames_of_a_short_video_and_many_of_a_long_one() -> None:
    assert len(decode_video(video_file(FRAMES[:3]), None, RULES).grids) == 2
    long = VideoRules(patch=4, merge=2, group=2, shortest=512, longest=8192, resample=3, fps=10.0, min_frames=4, max_frames=7)
    assert len(decode_video(MP4, None, long).grids) == 4


def cut(data: bytes) -> bytes:
    """A video whose index says more than is there: the frames' bytes are zeroed from the middle on."""
    at = data.index(b"mdat") + 4
    end = data.index(b"moov") - 4
    middle = (at + end) // 2
    return data[:middle] + bytes(end - middle) + data[end:]


def audio() -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


BAD = {
    "text": (b"hello", "none of the formats"),
    "image": (encoded(picture(20, 20)), "none of the formats"),
    "playlist": (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\nhttp://127.0.0.1/a.ts\n", "none of the formats"),
    "list of files": (b"ffconcat version 1.0\nfile /etc/passwd\n", "none of the formats"),
    "avi": (b"RIFF\x00\x00\x00\x00AVI LIST", "none of the formats"),
    "header alone": (b"\x00\x00\x00\x18ftypmp42", "cannot be decoded"),
    "truncated": (MP4[: len(MP4) // 2], "cannot be decoded"),
    "one frame": (video_file(FRAMES[:1]), "gives 1 frames; the model takes 2"),
    "sound": (audio(), "has no video"),
    "a codec that is not named": (video_file(FRAMES[:4], 10, "matroska", "ffv1"), "is coded in ffv1"),
    "zeros for frames": (cut(MP4), "cannot be decoded|is cut off"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_says_why(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(MediaError, match=message):
        decode_video(data, None, RULES)


def test_the_media_type_must_be_the_contents() -> None:
    with pytest.raises(MediaError, match="its media type is video/webm"):
        decode_video(MP4, "video/webm", RULES)
