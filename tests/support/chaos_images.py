"""Chats with images from a seed, and what transformers makes of them."""

from __future__ import annotations

import base64
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from model.vision.patches import ImagePixels
from protocol.commands import VisionGrid
from tests.support.chaos_judge import ROUTING_TIE, Judge
from tests.support.chaos_requests import WORDS, Answer, Request
from tests.support.checkpoints import read_config, smallest_margin
from tests.support.greedy import Judged
from tests.support.media import data_uri, encoded, picture, reference_pixels
from tests.support.vision_checkpoints import PROCESSOR, UNIT
from tests.support.vision_greedy import judge_vision, vision_config
from tests.support.vision_prompts import Picture, VisionPrompt, hf_model, hf_vision_logits
from tests.support.vision_text_model import SPECIALS

CHAT = "/v1/chat/completions"
POISON_COLOR = (255, 0, 255)
"""Of an image that has no other color; resizing keeps it."""
NO_PLACEHOLDERS = {str(SPECIALS.index(f"<|{kind}_pad|>")): -100.0 for kind in ("image", "video")}
SIZES = ((40, 30), (17, 70), (64, 64), (120, 40), (33, 47), (200, 90))
"""Width and height of images that come again and again."""
LARGEST = (64, 64)
"""An image of 64 rows: as many as one has at most."""


def image_part(data: bytes, kind: str = "png") -> dict[str, Any]:
    """The part of a message that shows the file of an image."""
    return {"type": "image_url", "image_url": {"url": data_uri(data, f"image/{kind}")}}


@cache
def _known(number: int) -> dict[str, Any]:
    """Image `number` of those that come again and again; every other one is a JPEG."""
    kind = ("png", "jpeg")[number % 2]
    return image_part(encoded(picture(*SIZES[number], seed=number), kind.upper()), kind)


def _chat(number: int, content: list[dict[str, Any]], body: dict[str, Any]) -> Request:
    return Request(number, CHAT, body | {"return_token_ids": True, "messages": [{"role": "user", "content": content}]})


def _words(rng: random.Random) -> dict[str, Any]:
    return {"type": "text", "text": " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))}


def image_chat(number: int, rng: random.Random) -> Request:
    """A chat with one to three images that other requests show, too; streamed or not, greedy or not, with one or two samples."""
    content = [dict(_known(rng.randrange(len(SIZES)))) for _ in range(rng.randint(1, 3))]
    for _ in range(rng.randint(0, 2)):
        content.insert(rng.randint(0, len(content)), _words(rng))
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "stream": rng.random() < 0.5, "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.4:
        body |= {"temperature": 0.0, "n": 1}
    else:
        body |= {"temperature": rng.choice([0.7, 1.0]), "seed": rng.randrange(1 << 40), "n": rng.choice([1, 2, 2])}
    return _chat(number, content, body)


def new_images(number: int, rng: random.Random, count: int, tokens: int = 40, text: str = "") -> Request:
    """A greedy stream over `count` large images that nothing else shows, so that they have to be encoded, after a text.

    Nothing ends it early, and no token of it is a placeholder, which transformers would want an image for.
    """
    files = [encoded(picture(*LARGEST, seed=1000 + 10 * number + place)) for place in range(count)]
    content = [{"type": "text", "text": text}, *(part for file in files for part in (image_part(file), _words(rng)))]
    body = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": True, "logit_bias": NO_PLACEHOLDERS}
    return _chat(number, content, body)


def poisoned_chat(number: int) -> Request:
    """A chat with an image of the color that `chaos_engine` can be told to fail at, behind one that others show."""
    content = [dict(_known(0)), image_part(encoded(Image.new("RGB", (80, 50), POISON_COLOR)))]
    return _chat(number, content, {"max_tokens": 8, "temperature": 0.0})


def files_of(body: dict[str, Any]) -> list[bytes]:
    """The files of all images of a request, in order."""
    contents = [message["content"] for message in body.get("messages", []) if isinstance(message["content"], list)]
    urls = [part["image_url"]["url"] for content in contents for part in content if part["type"] == "image_url"]
    return [base64.b64decode(url.partition(",")[2]) for url in urls]


def prompt_of(folder: Path, files: list[bytes], tokens: list[int]) -> VisionPrompt:
    """The prompt of a request with these images, resized by transformers' processor. `tokens` are what the server made of it."""
    image = read_config(folder)["image_token_id"]
    prompt = VisionPrompt(tokens=list(tokens), kinds=[int(token == image) for token in tokens])
    at = 0
    for file in files:
        values = torch.from_numpy(reference_pixels(file, PROCESSOR))
        height, width = (side // UNIT for side in values.shape[:2])
        at = prompt.kinds.index(1, at)
        prompt.grids.append(VisionGrid(start=at, height=height, width=width))
        prompt.images.append(ImagePixels(frames=1, height=height, width=width, pixels=values[None]))
        prompt.items.append(Picture(height, width))
        at += height * width
        assert at == len(prompt.kinds) or not prompt.kinds[at], f"{file[:8]!r} has more than {height} x {width} placeholders"
    assert sum(prompt.kinds) == sum(grid.height * grid.width for grid in prompt.grids), "placeholders without an image"
    return prompt


class ImageJudge(Judge):
    """Holds greedy chats with images to transformers, and knows near ties behind images."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._config = vision_config(folder)

    def judge_reference(self, requests: dict[int, Request], answers: dict[int, Answer]) -> Judged:
        """Raise AssertionError unless the greedy streams of `new_images` among the answers are as transformers continues them."""
        judged = Judged()
        for number, answer in sorted(answers.items()):
            body = requests[number].body
            files = files_of(body)
            if not files or body.get("logit_bias") != NO_PLACEHOLDERS:
                continue
            (sample,) = answer.samples.values()
            given = {"tokens": sample.token_ids, "finish": sample.finish, "terminal_events": sample.finishes, "error": answer.error}
            prompt = prompt_of(self.folder, files, answer.prompt_ids)
            bias = {int(token): value for token, value in NO_PLACEHOLDERS.items()}
            try:
                judge_vision(self.folder, prompt, given | {"logprobs": [], "prompt_logprobs": []}, bias)
            except AssertionError:
                if self.margin(requests[number], answer.prompt_ids, sample.token_ids) >= ROUTING_TIE:
                    raise
                judged.ties += 1
            judged.tokens += len(sample.token_ids)
        return judged

    def margin(self, request: Request, prompt: list[int], then: list[int]) -> float:
        """As without images, with them."""
        return smallest_margin(hf_model(self.folder), lambda: self.logits(request, prompt, then))

    def logits(self, request: Request, prompt: list[int], then: list[int]) -> torch.Tensor:
        """In float32, whose error is far below the gap that counts as a near tie."""
        return hf_vision_logits(self.folder, prompt_of(self.folder, files_of(request.body), prompt), self._config, then)[-1]
