"""Chat requests with images and videos: what reaches the engine, what is refused, and what is let go when a request ends."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ep_runtime.frontend.text.tokenizer import Tokenizer
from protocol.messages import Submit
from tests.http.conftest import Stack, metric, wait_metric
from tests.http.test_errors import check_error
from tests.support.media import data_uri, encoded, picture, reference_pixels, video_file
from tests.support.vision_text_model import IMAGE, UNIT, write_vision_text_model

INPUTS = ["text", "image", "video"]
MakeStack = Callable[..., Stack]
SMALL, TALL, WIDE = (encoded(picture(*size, seed=number)) for number, size in enumerate([(40, 30), (20, 70), (200, 50)]))
FILM = video_file([picture(64, 48, seed=number) for number in range(12)], 10)


BODY: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_uri(WIDE)}}]}]}


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_text_model(tmp_path_factory.mktemp("vision-text-model"))


@pytest.fixture(scope="module")
def seeing_stack(vision_model: Path) -> Iterator[Stack]:
    folder = vision_model.parent / "allowed"
    folder.mkdir()
    (folder / "small.png").write_bytes(SMALL)
    stack = Stack(
        vision_model, Tokenizer.load(vision_model), image_dir=str(folder), max_images=3, image_memory_bytes=60_000, max_queue=64
    )
    stack.engine_of(1, inputs=INPUTS)
    stack.server.wait_line("out", "ready")
    yield stack
    stack.close()


@pytest.fixture
def seeing(seeing_stack: Stack) -> Iterator[Stack]:
    """A stack whose model takes images; after a test nothing of them is held."""
    seeing_stack.output = "It is red."
    seeing_stack.engine.clear()
    seeing_stack.engine.release()
    yield seeing_stack
    seeing_stack.engine.release()
    assert metric(seeing_stack, "ep_journal_sequences") == 0
    assert metric(seeing_stack, "ep_image_bytes") == 0
    assert not any("Traceback" in line for line in seeing_stack.server.err), "\n".join(seeing_stack.server.err)


def image(data: bytes, media_type: str = "image/png", **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(data, media_type), **fields}}


def at(url: str, kind: str = "image") -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def expected(stack: Stack, parts: list[str | bytes]) -> tuple[list[int], list[tuple[int, np.ndarray]]]:
    """Token ids of the user's content, and each image's start and pixels. Images are files, the rest is text."""
    ids: list[int] = []
    images = []
    pad = stack.tokenizer.token_id("<|image_pad|>")
    assert pad is not None
    for part in parts:
        if isinstance(part, str):
            ids += stack.tokenizer.encode(part, False)
            continue
        pixels = reference_pixels(part, IMAGE)
        ids += stack.tokenizer.encode("<|vision_start|>", False)
        images.append((len(ids), pixels))
        ids += [pad] * (pixels.shape[0] * pixels.shape[1] // UNIT**2)
        ids += stack.tokenizer.encode("<|vision_end|>", False)
    return ids, images


def check_images(submit: Submit, images: list[tuple[int, np.ndarray]]) -> None:
    assert len(submit.images) == len(images)
    for found, (start, pixels) in zip(submit.images, images, strict=True):
        height, width, _ = pixels.shape
        assert (found.start, found.height * UNIT, found.width * UNIT, found.frames) == (start, height, width, 1)
        assert found.pixels == pixels.tobytes()
        assert found.digest == blake2b(struct.pack("<3I", 1, height, width) + found.pixels, digest_size=32).digest()


def test_images_reach_the_engine_as_transformers_prepares_them(seeing: Stack) -> None:
    content = [text("First "), image(SMALL, detail="high"), image(WIDE), text(" and "), image(TALL, detail="low"), text("?")]
    assert seeing.chat(messages=user(*content), temperature=0).json()["choices"][0]["message"]["content"] == "It is red."
    (submit,) = seeing.engine.submits(1)
    ids, images = expected(seeing, ["<|im_start|>user\nFirst ", SMALL, WIDE, " and ", TALL, "?<|im_end|>\n<|im_start|>assistant\n"])
    assert submit.prompt == ids
    check_images(submit, images)


def test_an_image_may_be_marked_for_caching(seeing: Stack) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    parts = [{**text("Look: "), **mark}, {**image(SMALL), **mark}]
    assert seeing.chat(messages=user(*parts), max_tokens=1).status_code == 200
    check_images(seeing.engine.submits(1)[0], expected(seeing, ["<|im_start|>user\nLook: ", SMALL])[1])


def test_the_openai_client_streams_several_samples(seeing: Stack) -> None:
    stream = seeing.client().chat.completions.create(
        model="tiny",
        messages=user(text("What?"), image(SMALL)),  # type: ignore[arg-type]
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    submits = seeing.engine.submits(2)
    assert submits[0].images == submits[1].images
    assert len(submits[0].images) == 1
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == len(submits[0].prompt)


def test_images_in_a_conversation_with_tools_and_a_format(seeing: Stack) -> None:
    seeing.output = '{"a": 1}'
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        *user(image(SMALL)),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [text("seen"), image(TALL)]},
    ]
    schema = {"type": "json_object"}
    answer = seeing.chat(messages=messages, tools=[tool], tool_choice="none", response_format=schema, max_tokens=60)
    assert answer.status_code == 200, answer.text
    (submit,) = seeing.engine.submits(1)
    sizes = [(found.height * UNIT, found.width * UNIT) for found in submit.images]
    assert sizes == [reference_pixels(data, IMAGE).shape[:2] for data in (SMALL, TALL)]


def test_videos_come_in_groups_with_their_times(seeing: Stack) -> None:
    answer = seeing.chat(messages=user(at(data_uri(FILM, "video/mp4"), "video"), image(SMALL), text("?")))
    assert answer.status_code == 200, answer.text
    (submit,) = seeing.engine.submits(1)
    # 12 frames at 10 a second: the least of 4 is taken, 0, 4, 7 and 11.
    assert [found.frames for found in submit.images] == [2, 2, 1]
    first, second, still = submit.images
    assert len(first.pixels) == 2 * 3 * first.rows * UNIT**2
    plain = seeing.tokenizer.decode(submit.prompt, skip_special_tokens=False)
    pads = "<|video_pad|>" * first.rows
    wanted = "".join(f"<{time} seconds><|vision_start|>{pads}<|vision_end|>" for time in ("0.2", "0.9"))
    assert f"<|im_start|>user\n<|vision_start|>{wanted}<|vision_end|><|vision_start|><|image_pad|>" in plain
    pad = seeing.tokenizer.token_id("<|video_pad|>")
    for found in (first, second):
        assert submit.prompt[found.start : found.start + found.rows] == [pad] * found.rows
        assert submit.prompt[found.start - 1] == seeing.tokenizer.token_id("<|vision_start|>")
    assert submit.prompt[still.start] == seeing.tokenizer.token_id("<|image_pad|>")


def test_text_alone_is_as_before(seeing: Stack) -> None:
    assert seeing.chat().status_code == 200
    (submit,) = seeing.engine.submits(1)
    assert submit.images == []


def test_tokenize_counts_every_row(seeing: Stack) -> None:
    messages = user(text("What?"), image(WIDE))
    tokens = seeing.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert seeing.chat(messages=messages).status_code == 200
    assert tokens == seeing.engine.submits(1)[0].prompt


def test_files_of_the_folder(seeing: Stack, vision_model: Path) -> None:
    folder = vision_model.parent / "allowed"
    assert seeing.chat(messages=user(at(f"file://{folder}/small.png"))).status_code == 200
    assert seeing.engine.submits(1)[0].images[0].pixels == reference_pixels(SMALL, IMAGE).tobytes()
    refused = seeing.chat(messages=user(at(f"file://{vision_model}/config.json")))
    assert "no file below the folder" in check_error(refused, 400, "messages.0.content.0")["message"]


def test_models_say_what_they_take(seeing: Stack, stack: Stack) -> None:
    assert seeing.http.get("/v1/models").json()["data"][0]["input_modalities"] == INPUTS
    assert seeing.http.get("/v1/models/tiny").json()["input_modalities"] == INPUTS
    assert stack.http.get("/v1/models/tiny").json()["input_modalities"] == ["text"]


def test_a_model_of_text_says_so(stack: Stack) -> None:
    for part in (image(SMALL), at("https://example.org/a.mp4", "video")):
        message = check_error(stack.chat(messages=user(text("What?"), part)), 400, "messages")["message"]
        assert message == f"content parts of type {part['type']!r} are not supported: the model takes text"
        check_error(stack.http.post("/tokenize", json={"messages": user(part)}), 400, "messages")
    other = user({"type": "input_audio", "input_audio": {}})
    assert "input_audio" in check_error(stack.chat(messages=other), 400, "messages")["message"]


SYSTEM = [{"role": "system", "content": [image(SMALL)]}, *user(text("Hi"))]
ASSISTANT = [*user(text("Hi")), {"role": "assistant", "content": [image(SMALL)]}]
PAD = "<|image_pad|>"
PARAM = "messages.0.content.0"
REFUSED: dict[str, tuple[list[dict[str, Any]], str | None, str]] = {
    "not base64": (user(at("data:image/png;base64,****")), PARAM, "is no base64"),
    "not an image": (user(image(b"hello")), PARAM, "the image is none of the formats"),
    "another type": (user(image(SMALL, "image/jpeg")), PARAM, "is a PNG file, but its media type is image/jpeg"),
    "truncated": (user(image(SMALL[:200])), PARAM, "cannot be decoded|truncated"),
    "an image as a video": (user(at(data_uri(SMALL), "video")), PARAM, "the video is none of the formats"),
    "url": (user(at("https://example.org/a.png")), PARAM, "the server fetches none"),
    "metadata": (user(at("http://169.254.169.254/latest")), PARAM, "the server fetches none"),
    "scheme": (user(at("ftp://example.org/a.png")), PARAM, "'ftp', which is not supported"),
    "the second": (user(image(SMALL), at("x")), "messages.0.content.1", "has no URL"),
    "too many": (user(*[image(SMALL)] * 4), "messages", "has 4 images and videos; the server takes 3"),
    "placeholder in the text": (user(text(f"a{PAD}"), image(SMALL)), "messages", "content.0 contains '<.image_pad.>'"),
    "placeholder alone": (user(text(PAD)), "messages", "content.0 contains"),
    "the template takes none": (SYSTEM, "messages", "has 0 placeholders for 1 images"),
    "in an answer": (ASSISTANT, "messages", "in the assistant's messages"),
    "no url": (user({"type": "image_url", "image_url": {}}), "messages.0.content.0.image_url.url", "Field required"),
    "detail": (user(image(SMALL, detail="ultra")), "messages.0.content.0.image_url.detail", "auto"),
    "unknown field": (user({**image(SMALL), "x": 1}), "messages.0.content.0.x", "Extra"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_is_wrong(seeing: Stack, name: str) -> None:
    messages, param, message = REFUSED[name]
    answer = seeing.chat(messages=messages)
    assert answer.status_code == 400, answer.text
    body = answer.json()["error"]
    assert body["param"] == param
    assert re.search(message, body["message"]), body["message"]
    assert seeing.engine.received == []


def test_a_placeholder_in_a_tool_call_pairs_with_no_image(seeing: Stack) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "<|image_pad|>"}'}}
    messages = [
        *user(image(SMALL)),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
    ]
    assert "has 2 placeholders for 1 images" in check_error(seeing.chat(messages=messages), 400, "messages")["message"]


@pytest.mark.parametrize("written_in", ["a tool's arguments", "two parts"])
def test_an_image_that_the_template_leaves_out_pairs_with_no_written_placeholder(seeing: Stack, written_in: str) -> None:
    function = {"name": "f", "arguments": json.dumps({"a": "<|image_pad|>"})}
    called = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    written = called if written_in == "a tool's arguments" else user(text("<|image_"), text("pad|>"))
    messages = [{"role": "system", "content": [text("Look."), image(SMALL)]}, *user(text("Hi")), *written]
    problem = check_error(seeing.chat(messages=messages), 400, "messages")["message"]
    assert "'<|image_pad|>' cannot be written in a message" in problem


def test_the_expanded_prompt_must_fit(make_stack: MakeStack, vision_model: Path) -> None:
    stack = make_stack(model=vision_model)
    stack.tokenizer = Tokenizer.load(vision_model)
    stack.engine_of(1, inputs=INPUTS, max_model_len=60)
    stack.server.wait_line("out", "ready")
    rows = reference_pixels(WIDE, IMAGE).size // 3 // UNIT**2
    assert rows > 60
    message = check_error(stack.chat(messages=user(image(WIDE))), 400, "prompt")["message"]
    assert "maximum context length is 60 tokens" in message
    assert stack.chat(messages=user(image(SMALL)), max_tokens=2).status_code == 200


def test_memory_of_images_is_bounded_and_given_back(seeing: Stack) -> None:
    size = reference_pixels(WIDE, IMAGE).nbytes
    assert 4 * size < 60_000 < 6 * size
    seeing.engine.hold()
    count = 60_000 // size

    def ask(number: int) -> int:
        return httpx.post(f"{seeing.url}/v1/chat/completions", json=BODY, timeout=60, trust_env=False).status_code

    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(ask, number) for number in range(count)]
        seeing.engine.submits(count)
        assert metric(seeing, "ep_image_bytes") == count * size
        refused = seeing.chat(messages=BODY["messages"])
        assert "The images of unfinished requests fill the server" in check_error(refused, 429)["message"]
        assert refused.headers["retry-after"]
        seeing.engine.release()
        assert [answer.result(60) for answer in answers] == [200] * count
    assert metric(seeing, "ep_image_bytes") == 0
    assert seeing.chat(messages=BODY["messages"]).status_code == 200


def test_a_request_that_is_too_large_alone(make_stack: MakeStack, vision_model: Path) -> None:
    bounds = {"image_memory_bytes": 5000, "max_image_bytes": 4000, "max_request_bytes": 2000, "max_image_request_bytes": 20_000}
    stack = make_stack(model=vision_model, **bounds)
    stack.engine_of(1, inputs=INPUTS)
    stack.server.wait_line("out", "ready")
    jpeg = encoded(picture(90, 40), "JPEG", quality=20)
    assert (
        "have more than 5000 bytes when decoded"
        in check_error(stack.chat(messages=user(image(jpeg, "image/jpeg"))), 400)["message"]
    )
    large = encoded(picture(60, 40))
    assert len(large) > 4000
    assert "bytes; the server takes 4000" in check_error(stack.chat(messages=user(image(large))), 400)["message"]
    # Only images may fill a larger body, and only where they may be.
    check_error(stack.chat(messages=user(text("a" * 3000))), 413)
    check_error(stack.chat(messages=user(text("a" * 30_000))), 413)
    check_error(stack.chat(logit_bias=dict.fromkeys(map(str, range(900)), 1)), 413)
    assert "so many values" in check_error(stack.chat(stop=["a"] * 1500), 413)["message"]
    check_error(stack.complete(prompt="a" * 3000), 413)


def test_a_replay_sends_the_images_again(make_stack: MakeStack, vision_model: Path) -> None:
    stack = make_stack(model=vision_model)
    stack.tokenizer = Tokenizer.load(vision_model)
    first = stack.engine_of(1, inputs=INPUTS, held=True)
    stack.server.wait_line("out", "ready")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stack.chat, messages=BODY["messages"])
        (submit,) = first.submits(1)
        first.step(2)
        first.stop("rank 1 was lost")
        second = stack.engine_of(2, inputs=INPUTS)
        (again,) = second.submits(1)
        assert answer.result(60).status_code == 200
    assert again.images == submit.images
    assert len(again.images) == 1
    assert again.prompt == submit.prompt
    wait_metric(stack, "ep_image_bytes", lambda value: value == 0)


def decoders_of(pid: int) -> list[int]:
    """Children of this process that decode."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"vision.child" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def test_decoders_end_with_the_frontend(make_stack: MakeStack, vision_model: Path) -> None:
    stack = make_stack(model=vision_model)
    stack.engine_of(1, inputs=INPUTS)
    stack.server.wait_line("out", "ready")
    assert stack.chat(messages=BODY["messages"], max_tokens=1).status_code == 200
    (pid,) = decoders_of(stack.server.process.pid)
    # One that dies between two requests costs nobody anything.
    wait_ended(pid, lambda: os.kill(pid, signal.SIGKILL))
    assert stack.chat(messages=BODY["messages"], max_tokens=1).status_code == 200
    (pid,) = decoders_of(stack.server.process.pid)
    wait_ended(pid, stack.server.process.kill)


def wait_ended(pid: int, act: Callable[[], None]) -> None:
    """Wait until this process has ended after `act`."""
    descriptor = os.pidfd_open(pid)
    act()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(60_000)
    os.close(descriptor)


def test_a_client_that_leaves_while_its_images_are_loaded(make_stack: MakeStack, vision_model: Path) -> None:
    stack = make_stack(model=vision_model)
    stack.engine_of(1, inputs=INPUTS)
    stack.server.wait_line("out", "ready")
    data = json.dumps(BODY).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    with socket.create_connection(tuple(stack.url.removeprefix("http://").split(":"))) as sock:
        sock.sendall("\r\n".join([*lines, "", ""]).encode() + data)
    assert stack.chat(messages=BODY["messages"], max_tokens=1).status_code == 200
    assert metric(stack, "ep_image_bytes") == 0
