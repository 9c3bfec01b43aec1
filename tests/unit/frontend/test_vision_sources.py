"""Where an image may come from, what a folder says of a model's images, where they stand in a prompt, and the memory they hold."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.config import FrontendConfig
from ep_runtime.frontend.journal import Journal
from ep_runtime.frontend.text.errors import TextError
from ep_runtime.frontend.text.tokenizer import Tokenizer
from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.jobs import Grid
from ep_runtime.frontend.vision.memory import ImageMemory
from ep_runtime.frontend.vision.placeholders import check_counts, check_literals, expand, write_times
from ep_runtime.frontend.vision.rules import ImageRules, VideoRules
from ep_runtime.frontend.vision.settings import Placeholders, VisionSettings, load_vision
from ep_runtime.frontend.vision.sources import Source, data_source, file_source, scheme_of
from protocol.messages import SamplingParams, SequenceUpdate, Submit, VisionInput
from tests.support.vision_text_model import IMAGE, VIDEO, write_vision_text_model


@pytest.mark.parametrize("url", ["data:,", "DATA:x", "http://a", "HTTPS://a", "file:///a"])
def test_schemes(url: str) -> None:
    assert scheme_of(url) in ("data", "http", "https", "file")


@pytest.mark.parametrize(
    "url", ["", "a.png", "/etc/passwd", "ftp://a/", "javascript:1", "blob:1", " data:image/png;base64,QQ==", "//a/b"]
)
def test_what_is_no_url_that_is_taken(url: str) -> None:
    with pytest.raises(MediaError):
        scheme_of(url)


def test_data_uris() -> None:
    assert data_source("data:image/png;base64,QUJD", 3) == Source(b"QUJD", base64=True, media_type="image/png")
    assert data_source("Data:IMAGE/PNG;BASE64,QQ==", 1).media_type == "image/png"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png,QUJD", "not of the form"),
        ("data:;base64,QUJD", "not of the form"),
        ("data:text/html;base64,QUJD", "not of the form"),
        ("data:image/png;charset=utf-8;base64,QUJD", "not of the form"),
        ("data:image/" + "x" * 200 + ";base64,QUJD", "not of the form"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,QUJé", "beyond ASCII"),
        ("data:image/png;base64," + "QUJD" * 100, "has 300 bytes; the server takes 9"),
    ],
)
def test_data_uris_that_are_refused(url: str, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        data_source(url, 9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "images"
    (inside / "deep").mkdir(parents=True)
    (tmp_path / "images-too").mkdir()
    (inside / "a b.png").write_bytes(b"inside")
    (inside / "deep" / "c.png").write_bytes(b"deeper")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "images-too" / "d").write_bytes(b"secret")
    (inside / "out").symlink_to(tmp_path / "secret")
    (inside / "in").symlink_to(inside / "deep" / "c.png")
    (inside / "up").symlink_to(tmp_path)
    os.mkfifo(inside / "pipe")
    return inside


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("a%20b.png", b"inside"),
        ("deep/c.png", b"deeper"),
        ("deep/../deep/c.png", b"deeper"),
        ("in", b"deeper"),
        ("deep/c.png?a#b", b"deeper"),
    ],
)
def test_files_below_the_folder(folder: Path, path: str, data: bytes) -> None:
    assert file_source(f"file://{folder}/{path}", folder, 10) == Source(data)
    assert file_source(f"file://localhost{folder}/{path}", folder, 10) == Source(data)
    (folder.parent / "link").symlink_to(folder)
    assert file_source(f"file://{folder}/{path}", folder.parent / "link", 10) == Source(data)


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "deep/../../secret",
        "..%2fsecret",
        "out",
        "up/secret",
        "../images-too/d",
        "nothing",
        "",
        ".",
        "deep",
        "pipe",
        "a%00b",
    ],
)
def test_files_that_are_out_of_reach(folder: Path, path: str) -> None:
    with pytest.raises(MediaError, match="is no file below the folder"):
        file_source(f"file://{folder}/{path}", folder, 10)


def test_files_that_are_refused(folder: Path) -> None:
    with pytest.raises(MediaError, match="more than 5 bytes"):
        file_source(f"file://{folder}/deep/c.png", folder, 5)
    with pytest.raises(MediaError, match="allows none"):
        file_source(f"file://{folder}/deep/c.png", None, 10)
    for url in (f"file:{folder}/in", f"file://host{folder}/in", "file://"):
        with pytest.raises(MediaError, match="for which the URL is"):
            file_source(url, folder, 10)


def load(folder: Path) -> VisionSettings | None:
    return load_vision(folder, Tokenizer.load(folder), max_image_pixels=2048, max_video_pixels=2**20)


def test_settings_of_a_folder(tmp_path: Path) -> None:
    found = load(write_vision_text_model(tmp_path))
    assert found is not None
    assert found.image == ImageRules(patch=4, merge=2, shortest=256, longest=2048, resample=3)
    rules = VideoRules(patch=4, merge=2, group=2, shortest=512, longest=8192, resample=3, fps=2.0, min_frames=4, max_frames=768)
    assert found.video == rules
    assert (found.placeholders.image, found.placeholders.end) == ("<|image_pad|>", "<|vision_end|>")


def test_settings_in_one_file_and_by_older_names(tmp_path: Path) -> None:
    folder = write_vision_text_model(tmp_path, image={})
    older = {name: value for name, value in IMAGE.items() if name != "size"} | {"min_pixels": 100, "max_pixels": 200, "resample": 2}
    capped = {**VIDEO, "cap_pixels_per_frame": True, "max_video_tokens": 5, "fps": 1}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": older, "video_processor": capped}))
    found = load(folder)
    assert found is not None
    assert (found.image.shortest, found.image.longest, found.image.resample) == (100, 200, 2)
    assert found.video is not None
    assert (found.video.frame_tokens, found.video.fps) == (5, 1.0)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({**IMAGE, "patch_size": 14}, r"are \(14, 2, 2\), but \(4, 2, 2\) in config.json"),
        ({**IMAGE, "merge_size": 1}, "in config.json"),
        ({**IMAGE, "size": {"height": 224, "width": 224}}, "shortest_edge"),
        ({**IMAGE, "size": {"shortest_edge": 500, "longest_edge": 400}}, "not above"),
        ({**IMAGE, "do_resize": False}, "do_resize"),
        ({**IMAGE, "resample": 9}, "resample"),
        ({"image_processor_type": "Qwen2VLImageProcessor"}, "patch_size"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path: Path, image: dict[str, Any], message: str) -> None:
    with pytest.raises(TextError, match=message):
        load(write_vision_text_model(tmp_path, image=image))


def test_models_whose_images_are_not_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_vision_text_model(tmp_path, image={"image_processor_type": "OtherProcessor"})
    assert load(folder) is None
    assert "no images" in caplog.text
    write_vision_text_model(folder, video={"video_processor_type": "OtherProcessor"})
    found = load(folder)
    assert found is not None
    assert found.video is None
    (folder / "preprocessor_config.json").unlink()
    assert load(folder) is None
    write_vision_text_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "image_token_id": 100}))
    with pytest.raises(TextError, match="the vision token 100 is no special token"):
        load(folder)


MARKS = Placeholders(image="<I>", video="<V>", start="<S>", end="<E>", image_id=7, video_id=8)


def grid(height: int, width: int, frames: int = 1) -> Grid:
    return Grid(height=height, width=width, frames=frames, pixels=bytes([height, width]))


def test_rows_stand_where_their_placeholder_stood() -> None:
    ids, inputs = expand([1, 7, 2, 8, 3, 8, 7], [grid(1, 2), grid(2, 2)], [grid(1, 1, 2), grid(1, 3, 2)], MARKS, 32)
    assert ids == [1, 7, 7, 2, 8, 3, 8, 8, 8, 7, 7, 7, 7]
    assert [(image.start, image.rows, image.frames, image.pixels) for image in inputs] == [
        (1, 2, 1, b"\x01\x02"),
        (4, 1, 2, b"\x01\x01"),
        (6, 3, 2, b"\x01\x03"),
        (9, 4, 1, b"\x02\x02"),
    ]


@pytest.mark.parametrize("ids", [[1], [7, 7], [8]])
def test_placeholders_must_pair_with_images(ids: list[int]) -> None:
    with pytest.raises(MediaError, match="placeholders than images"):
        expand(ids, [grid(1, 1)], [], MARKS, 32)


def test_times_of_a_video_are_written_as_transformers_writes_them() -> None:
    text = write_times("a<S><V><E>b<V>c", [[0.25, 1.0], [12.06]], MARKS)
    assert text == "a<S><0.2 seconds><S><V><E><1.0 seconds><S><V><E><E>b<12.1 seconds><S><V><E>c"


def test_texts_with_placeholders_are_named() -> None:
    check_literals([("a", "<I"), ("b", "V>")], MARKS)
    with pytest.raises(MediaError, match="b contains '<V>'"):
        check_literals([("a", "fine"), ("b", "x<V>")], MARKS)
    with pytest.raises(MediaError, match="0 placeholders for 1 images: it takes none in a message of this role"):
        check_counts("nothing", 1, 0, MARKS)
    with pytest.raises(MediaError, match="2 placeholders for 1 videos: '<V>' cannot be written"):
        check_counts("<V><V><I>", 1, 1, MARKS)


def submit(name: str, group: str, size: int) -> Submit:
    image = VisionInput(start=0, height=1, width=1, frames=1, digest=bytes(32), pixels=bytes(size))
    return Submit(name, group, [1], SamplingParams(seed=1, max_tokens=9), images=[image] if size else [])


class Ignore:
    def deliver(self, update: SequenceUpdate) -> None:
        pass

    def fail(self, error: ApiError) -> None:
        pass


def test_memory_is_held_for_each_sequence_until_it_ends() -> None:
    journal = Journal()
    memory = ImageMemory(100, lambda: journal.image_bytes)
    with memory.holding() as hold:
        hold.take(60)
        with memory.holding() as other, pytest.raises(ApiError) as error:
            other.take(41)
        assert (error.value.status_code, memory.held) == (429, 60)
        with pytest.raises(ApiError) as error:
            hold.take(41)
        assert error.value.status_code == 400
    with memory.holding(4) as of_four:
        of_four.take(25)
        with pytest.raises(ApiError) as error:
            of_four.take(1)
        assert (error.value.status_code, error.value.code, memory.held) == (400, "images_too_large", 100)
    assert memory.held == 0
    for name in ("a", "b"):
        journal.add(submit(name, "g", 30), Ignore())
    journal.add(submit("c", "h", 20), Ignore())
    journal.add(submit("d", "i", 0), Ignore())
    assert memory.held == 80, "each sample of a request has a copy on its way to the engine"
    journal.check_integrity()
    assert [len(image.pixels) for entry in journal.unfinished()[:1] for image in entry.replay().images] == [30]
    journal.record(SequenceUpdate("a", [1], finish="stop"))
    assert memory.held == 50
    journal.withdraw(["b"])
    assert memory.held == 20
    journal.check_integrity()
    journal.withdraw(["c", "d"])
    assert memory.held == 0
    journal.check_integrity()


@pytest.mark.parametrize("fields", [{"image_url_hosts": ["https://a"]}, {"image_dir": "/nowhere/at/all"}])
def test_settings_of_the_server_that_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is no host|is no folder"):
        FrontendConfig(model="m", served_model_name=("m",), runtime_dir="/x", **fields)
