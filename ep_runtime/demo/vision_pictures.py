"""Pictures of one coloured shape on a pale ground, drawn at random: what the vision demo learns and is asked about."""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 210),
    "yellow": (240, 210, 30),
}
SHAPES = ("circle", "square", "triangle")
SIDES = (128, 192, 256)
"""Pixels of a side of a drawing."""
JITTER = 12
"""How far each channel of a colour may be from what `COLOURS` says."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a picture shows."""

    colour: str
    shape: str

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape}"


def subjects() -> list[Subject]:
    """Every colour with every shape."""
    return [Subject(colour, shape) for colour in COLOURS for shape in SHAPES]


def draw(subject: Subject, chance: random.Random, size: tuple[int, int] | None = None) -> Image.Image:
    """An RGB picture; its size (width, height) unless given, and place, extent, tint and ground are left to `chance`."""
    width, height = size or (chance.choice(SIDES), chance.choice(SIDES))
    ground = tuple(chance.randint(235, 255) for _ in range(3))
    image = Image.new("RGB", (width, height), ground)
    reach = min(width, height) * chance.uniform(0.36, 0.47)
    centre = (chance.uniform(reach, width - reach), chance.uniform(reach, height - reach))
    tint = tuple(min(255, max(0, channel + chance.randint(-JITTER, JITTER))) for channel in COLOURS[subject.colour])
    pen = ImageDraw.Draw(image)
    left, top, right, bottom = centre[0] - reach, centre[1] - reach, centre[0] + reach, centre[1] + reach
    match subject.shape:
        case "circle":
            pen.ellipse((left, top, right, bottom), fill=tint)
        case "square":
            pen.rectangle((left, top, right, bottom), fill=tint)
        case "triangle":
            pen.polygon([(centre[0], top), (right, bottom), (left, bottom)], fill=tint)
        case _:
            raise ValueError(f"no shape is called {subject.shape!r}")
    return image


def png(image: Image.Image) -> bytes:
    """The picture as a PNG file."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def data_uri(image: Image.Image) -> str:
    """The picture as a `data:` URI, the form in which a chat request carries it."""
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
