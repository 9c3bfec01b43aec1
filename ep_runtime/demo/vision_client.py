"""Asks a running server that serves the vision demo's model what drawn pictures show, and judges the answers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ep_runtime.demo.client import WrongAnswer, ask
from ep_runtime.demo.vision_pictures import COLOURS, SHAPES, Subject, data_uri, draw, png
from ep_runtime.demo.vision_text import question_of

SEED = 20
"""Of the drawings; those of the training have other seeds."""
ASKED = ((Subject("red", "circle"),), (Subject("blue", "square"), Subject("yellow", "triangle")))
"""What the pictures of each request show."""
VOCABULARY = (*COLOURS, *SHAPES)


def show_and_ask(base_url: str) -> None:
    """Draw, ask and print. Raises `WrongAnswer`, and `openai.APIError` when the server refuses or the stream breaks."""
    chance = random.Random(SEED)
    for shown in ASKED:
        pictures = [draw(subject, chance) for subject in shown]
        for subject, picture in zip(shown, pictures, strict=True):
            print(f"\nPicture:  {subject}, {picture.width} x {picture.height} pixels, a PNG of {len(png(picture))} bytes", end="")
        question = question_of(len(shown))
        print(f"\nQuestion: {question}\nAnswer:   ", end="", flush=True)
        judge(ask(base_url, question, pictures=[data_uri(picture) for picture in pictures]), shown)


def judge(answer: str, shown: Sequence[Subject]) -> None:
    """Raise `WrongAnswer` unless the answer names the colour and shape of each picture, in order, and no more."""
    words = answer.replace(",", " ").replace(":", " ").split()
    colours_and_shapes = [word for word in words if word in VOCABULARY]
    expected = [word for subject in shown for word in (subject.colour, subject.shape)]
    if colours_and_shapes != expected:
        raise WrongAnswer(f"the picture shows {' and '.join(map(str, shown))}, but the answer is {answer!r}")
