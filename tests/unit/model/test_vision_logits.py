"""Whole models with images against transformers, in float32: rows from our tower, prompts in one piece and in chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.errors import BatchError
from model.vision.config import VisionConfig
from model.vision.positions import position_shift
from tests.support.batches import Part, Ranks, relative_error
from tests.support.vision_checkpoints import VARIANTS
from tests.support.vision_prompts import (
    Picture,
    Video,
    VisionPrompt,
    encode,
    forward_options,
    hf_vision_logits,
    vision_logits,
    vision_prompt,
)

Folders = Callable[[str], Path]
TOLERANCE = 1e-4
PROMPTS = {
    "first": (Picture(3, 5), 9),
    "middle": (7, Picture(2, 6), 11),
    "last": (8, Picture(4, 3)),
    "smallest": (1, Picture(1, 1), 2),
    "three": (5, Picture(2, 3), 4, Picture(6, 1, seed=1), Picture(3, 3, seed=2), 6),
    "video": (3, Video(2, 3, groups=3), 5),
    "both": (Picture(2, 2), 2, Video(3, 2, groups=2, seed=3), Picture(2, 5, seed=4), 3),
    "text": (12,),
}


def config_of(ranks: Ranks) -> VisionConfig:
    tower = ranks.models[0].tower
    assert tower is not None
    return tower.config


@pytest.mark.parametrize("name", VARIANTS)
def test_prompts_of_every_shape(vision_folder: Folders, name: str) -> None:
    ranks = Ranks(vision_folder(name))
    for shape, parts in PROMPTS.items():
        prompt = vision_prompt(*parts, seed=len(shape))
        got = vision_logits(ranks, 0, prompt, encode(ranks, prompt))
        assert relative_error(got, hf_vision_logits(vision_folder(name), prompt, config_of(ranks))) < TOLERANCE, shape
        # The next prompt is in the same slot.
        ranks.free(0)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5_moe"])
def test_chunk_borders_inside_an_image(vision_folder: Folders, name: str) -> None:
    ranks = Ranks(vision_folder(name))
    prompt = vision_prompt(*PROMPTS["three"], seed=1)
    rows = encode(ranks, prompt)
    whole = vision_logits(ranks, 0, prompt, rows)
    for slot, chunk in enumerate((1, 4, 7), start=1):
        assert relative_error(vision_logits(ranks, slot, prompt, rows, chunk), whole) < TOLERANCE, chunk


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_after_images(vision_folder: Folders, name: str) -> None:
    """Positions go on behind the larger side of a grid; rows that decode may give them as one part."""
    ranks = Ranks(vision_folder(name))
    prompt = vision_prompt(*PROMPTS["both"], seed=2)
    rows, then = encode(ranks, prompt), [5, 17, 250, 299]
    expected = hf_vision_logits(vision_folder(name), prompt, config_of(ranks), then)
    assert relative_error(vision_logits(ranks, 0, prompt, rows, then=then), expected) < TOLERANCE
    vision_logits(ranks, 1, prompt, rows)
    for number, token in enumerate(then):
        place = len(prompt.tokens) + number + position_shift(prompt.grids)
        options = forward_options(VisionPrompt(), [], place, place + 1)
        (output,) = ranks.run(ranks.batch([Part(1, [token])], positions=options["positions"][0]))
        assert output.logits is not None
        assert relative_error(output.logits[0], expected[len(prompt.tokens) + number]) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_several_ranks_and_what_entered_layer_0(vision_folder: Folders, name: str) -> None:
    """Ranks that have the rows but no tower agree in what enters their layers, and the logits are the same."""
    path = vision_folder(name)
    ranks = Ranks(path, 3)
    assert [model.tower is not None for model in ranks.models] == [True, False, False]
    prompt = vision_prompt(*PROMPTS["middle"], seed=3)
    rows = encode(ranks, prompt)
    outputs = ranks.run(ranks.batch([Part(0, prompt.tokens)], routing=True, **forward_options(prompt, rows, 0, len(prompt.tokens))))
    assert outputs[0].logits is not None
    assert relative_error(outputs[0].logits, hf_vision_logits(path, prompt, config_of(ranks))) < TOLERANCE
    hidden = ranks.models[0].spec().hidden_size
    inputs = ranks.models[0].embedding[torch.tensor(prompt.tokens)]
    start = prompt.grids[0].start
    inputs[start : start + 12] = rows[0][:, :hidden]
    for output in outputs:
        assert output.inputs is not None
        assert torch.equal(output.inputs, inputs)


def test_an_image_beside_text_and_decode_rows(vision_folder: Folders) -> None:
    """Three sequences in one batch; only one has an image in this forward."""
    path = vision_folder("qwen3_vl")
    ranks = Ranks(path)
    prompts = [vision_prompt(*parts, seed=seed) for seed, parts in enumerate(((6, Picture(3, 2), 4), (13,), (5, Picture(1, 4))))]
    expected = [hf_vision_logits(path, prompt, config_of(ranks)) for prompt in prompts]
    rows = [encode(ranks, prompt) for prompt in prompts]
    ranks.prompt(1, prompts[1].tokens[:12])
    first, second = (forward_options(prompts[n], rows[n], 0, len(prompts[n].tokens)) for n in (0, 2))
    text = forward_options(prompts[1], [], 12, 13)
    before = len(prompts[0].tokens) + 1
    batch = ranks.batch(
        [Part(0, prompts[0].tokens), Part(1, prompts[1].tokens[12:]), Part(2, prompts[2].tokens)],
        positions=torch.cat([torch.from_numpy(part["positions"]) for part in (first, text, second)], 1).numpy(),
        inserted=(
            [*first["inserted"][0], *(before + row for row in second["inserted"][0])],
            torch.cat((first["inserted"][1], second["inserted"][1])),
        ),
    )
    (output,) = ranks.run(batch)
    assert output.logits is not None
    assert output.inputs is None
    got = output.logits.split([len(prompts[0].tokens), 1, len(prompts[2].tokens)])
    for part, reference in zip(got, (expected[0], expected[1][12:], expected[2]), strict=True):
        assert relative_error(part, reference) < TOLERANCE


def test_rows_that_do_not_fit_are_refused(vision_folder: Folders) -> None:
    ranks = Ranks(vision_folder("qwen3_vl"))
    prompt = vision_prompt(*PROMPTS["middle"])
    rows = encode(ranks, prompt)
    options = forward_options(prompt, rows, 0, len(prompt.tokens))
    places, values = options["inserted"]
    for wrong in ((places[1:], values), (places, values[:, :-1])):
        with pytest.raises(BatchError, match="inserted rows"):
            ranks.run(ranks.batch([Part(0, prompt.tokens)], positions=options["positions"], inserted=wrong))
        ranks.free(0)
