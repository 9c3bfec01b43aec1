"""The vision demo from its training to a server on two ranks, whose answers are transformers' for the same folder."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from PIL import Image

from ep_runtime.demo.client import content_of
from ep_runtime.demo.vision_client import show_and_ask
from ep_runtime.demo.vision_pictures import Subject, data_uri, draw, subjects
from ep_runtime.demo.vision_text import ONE, TALK, TWO, answer_of
from ep_runtime.demo.vision_training import train
from tests.support.demo_server import DemoServer
from tests.support.vision_demo import TOKENS, Reference

REQUEST_SECONDS = 60.0
MODEL = "pictures"


@dataclass(frozen=True)
class Asked:
    """A question behind pictures, what they show, and transformers' answer."""

    question: str
    shown: tuple[Subject, ...]
    pictures: tuple[Image.Image, ...]
    answer: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    train(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def singles(reference: Reference) -> list[Asked]:
    """Two pictures of every subject, of the sizes that chance gives them."""
    chance = random.Random(77)
    drawn = [(subject, draw(subject, chance)) for subject in subjects() * 2]
    return [Asked(ONE, (subject,), (picture,), reference.answer(ONE, [picture])) for subject, picture in drawn]


@pytest.fixture(scope="module")
def pairs(reference: Reference, singles: list[Asked]) -> list[Asked]:
    """Pictures of different subjects in one prompt, each pair in both orders."""
    couples = [(singles[number], singles[number + 7]) for number in range(0, 16, 2)]
    ordered = [order for couple in couples for order in (couple, couple[::-1])]
    found = []
    for first, second in ordered:
        pictures = first.pictures + second.pictures
        found.append(Asked(TWO, first.shown + second.shown, pictures, reference.answer(TWO, pictures)))
    return found


@pytest.fixture(scope="module")
def talk(reference: Reference) -> list[Asked]:
    return [Asked(question, (), (), reference.answer(question)) for question in TALK]


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    flags = [
        f"--model={folder}",
        f"--served-model-name={MODEL}",
        "--max-model-len=256",
        "--num-blocks=64",
        "--max-num-seqs=4",
        "--drain-timeout=5",
    ]
    server = DemoServer(tmp_path_factory.mktemp("server"), 2, *flags)
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(server: DemoServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=REQUEST_SECONDS) as client:
        yield client


def ask(client: openai.OpenAI, asked: Asked) -> str:
    """The streamed answer."""
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content_of(asked.question, [data_uri(picture) for picture in asked.pictures])}],
        temperature=0.0,
        max_tokens=TOKENS,
        stream=True,
    )
    return "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)


def right(asked: list[Asked]) -> float:
    """The share of answers that name what is shown."""
    return sum(one.answer == answer_of(one.shown) for one in asked) / len(asked)


def test_transformers_names_what_new_pictures_show(singles: list[Asked], pairs: list[Asked], talk: list[Asked]) -> None:
    assert right(singles) >= 0.95
    assert right(pairs) >= 0.9
    assert {one.question: one.answer for one in talk} == TALK


def test_two_ranks_name_every_colour_and_shape(client: openai.OpenAI, singles: list[Asked]) -> None:
    assert [ask(client, one) for one in singles] == [one.answer for one in singles]


def test_two_images_of_a_prompt_are_told_apart_in_both_orders(client: openai.OpenAI, pairs: list[Asked]) -> None:
    answers = [ask(client, one) for one in pairs]
    assert answers == [one.answer for one in pairs]
    assert all(one != other for one, other in zip(answers[::2], answers[1::2], strict=True))


def test_prompts_with_and_without_images_stream_at_once(
    client: openai.OpenAI, singles: list[Asked], pairs: list[Asked], talk: list[Asked]
) -> None:
    mixed = [*singles, *pairs, *talk * 4]
    random.Random(1).shuffle(mixed)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: ask(client, one), mixed))
    assert answers == [one.answer for one in mixed]


def test_text_after_an_image_is_answered_as_ever(client: openai.OpenAI, pairs: list[Asked], talk: list[Asked]) -> None:
    for picture, text in zip(pairs, talk, strict=False):
        assert ask(client, picture) == picture.answer
        assert ask(client, text) == TALK[text.question]


def test_the_demos_own_questions_are_answered(server: DemoServer, capsys: pytest.CaptureFixture[str]) -> None:
    show_and_ask(f"{server.url}/v1")
    assert "Answer:   first: a blue square, second: a yellow triangle" in capsys.readouterr().out
