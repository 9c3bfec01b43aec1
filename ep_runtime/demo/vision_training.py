"""Trains the vision demo's model from random weights and fills its folder.

A process of its own: `python -m ep_runtime.demo.vision_training FOLDER`. One thread and fixed seeds, so that a machine gives the
same weights each time. A step sees one kind of prompt (one picture, two, or none), its pictures alike in size, and the answers of a
kind have the same number of tokens, so that a batch needs no padding.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional

from ep_runtime.demo.training import Progress, TrainingFailed, rate_at, run_training
from ep_runtime.demo.vision_folder import CUT, MERGE, model_config, vision_ids, write_folder
from ep_runtime.demo.vision_pictures import Subject, draw, subjects
from ep_runtime.demo.vision_text import END, TALK, answer_of, build_tokenizer, question_of, render

PICTURES = 3000
HELD_OUT = 240
ROUNDS = ((450, 3e-3), (250, 1.5e-3), (250, 1.5e-3))
"""Steps and highest learning rate; the later ones run when the target is missed, as may be where a CPU rounds otherwise."""
SINGLES = 150
"""The first steps show one picture at a time: which of two is which is learnt faster once shapes are known."""
TALK_EVERY = 10
BATCH = 32
SPREAD = 0.12
"""Standard deviation of the first weights: with transformers' 0.02 a model this narrow takes twice as many steps."""
TARGET = 0.006
"""Most of the loss a token on pictures that were held out, at which the answers are right."""

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Shown:
    """A picture as the model sees it: patches `[height * width, values]`."""

    subject: Subject
    patches: torch.Tensor


class Album:
    """Drawn pictures by the size of their grid."""

    def __init__(self, count: int, seed: int) -> None:
        chance = random.Random(seed)
        processor = transformers.Qwen2VLImageProcessorPil(**CUT)
        kinds = subjects()
        self._by_grid: dict[Grid, list[Shown]] = {}
        for number in range(count):
            subject = kinds[number % len(kinds)]
            found = processor(draw(subject, chance), return_tensors="pt")
            time, height, width = found["image_grid_thw"][0].tolist()
            self._by_grid.setdefault((time, height, width), []).append(Shown(subject, found["pixel_values"]))
        self._grids = list(self._by_grid)
        self._sizes = [len(shown) for shown in self._by_grid.values()]

    def grids(self, chance: random.Random, count: int) -> list[Grid]:
        """Sizes as frequent as in the album."""
        return chance.choices(self._grids, self._sizes, k=count)

    def pick(self, chance: random.Random, grids: list[Grid]) -> list[Shown]:
        """A picture of each of these sizes."""
        return [chance.choice(self._by_grid[grid]) for grid in grids]


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts of one form with their answers: `tokens` [batch, length], the first `prompt` of each the prompt's."""

    tokens: torch.Tensor
    prompt: int
    grids: list[Grid]
    patches: torch.Tensor | None


class Course:
    """What a step shows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.image = vision_ids(tokenizer)["image_token_id"]

    def about_pictures(self, album: Album, chance: random.Random, pictures: int, size: int = BATCH) -> Batch:
        """`size` prompts with that many pictures each."""
        grids = album.grids(chance, pictures)
        shown = [album.pick(chance, grids) for _ in range(size)]
        prompt = self._prompt(render(question_of(pictures), pictures), grids)
        answers = [self._ids(answer_of([one.subject for one in row]) + END) for row in shown]
        patches = torch.cat([one.patches for row in shown for one in row])
        return Batch(torch.tensor([prompt + answer for answer in answers]), len(prompt), grids, patches)

    def talk(self, chance: random.Random) -> Batch:
        """One prompt without a picture."""
        question, answer = chance.choice(list(TALK.items()))
        prompt = self._ids(render(question))
        return Batch(torch.tensor([prompt + self._ids(answer + END)]), len(prompt), [], None)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def _prompt(self, text: str, grids: list[Grid]) -> list[int]:
        """Each placeholder repeated for every row of its picture."""
        rows = iter([height * width // MERGE**2 for _, height, width in grids])
        return [token for one in self._ids(text) for token in [one] * (next(rows) if one == self.image else 1)]


def loss_of(model: Any, batch: Batch, image: int) -> tuple[torch.Tensor, float]:
    """Mean loss of the answers' tokens, and the share of answers that are right in all of them."""
    tokens, size = batch.tokens, len(batch.tokens)
    inputs: dict[str, Any] = {}
    if batch.patches is not None:
        kinds = (tokens == image).int()
        # Rows are alike but for what their pictures show: the positions of one are those of all.
        positions, _ = model.model.get_rope_index(tokens[:1], kinds[:1], image_grid_thw=torch.tensor(batch.grids))
        inputs = {
            "position_ids": positions.expand(-1, size, -1),
            "mm_token_type_ids": kinds,
            "pixel_values": batch.patches,
            "image_grid_thw": torch.tensor(batch.grids * size),
        }
    answers = tokens[:, batch.prompt :]
    logits = model(input_ids=tokens, use_cache=False, logits_to_keep=answers.shape[1] + 1, **inputs).logits[:, :-1]
    right = (logits.argmax(-1) == answers).all(-1).float().mean().item()
    return functional.cross_entropy(logits.flatten(0, 1), answers.flatten()), right


def lessons(course: Course) -> Iterator[Batch]:
    """The batch of each step, without end."""
    album, chance = Album(PICTURES, seed=1), random.Random(2)
    for step in itertools.count():
        if step % TALK_EVERY == TALK_EVERY - 1:
            yield course.talk(chance)
        else:
            yield course.about_pictures(album, chance, 2 if step >= SINGLES and step % 2 else 1)


def train(folder: Path) -> None:
    """Train until the target is met and fill the existing `folder`. Raises `TrainingFailed`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    course = Course(tokenizer)
    model = new_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    batches = lessons(course)
    for steps, rate in ROUNDS:
        run_round(model, course.image, optimizer, itertools.islice(batches, steps), steps, rate)
        loss = held_out_loss(model, course)
        if loss <= TARGET:
            break
    else:
        raise TrainingFailed(f"after the last step the loss on pictures held out is {loss:.4f}; it must be at most {TARGET:g}")
    write_folder(folder, tokenizer)
    save_file(published(model), folder / "model.safetensors", metadata={"format": "pt"})


def run_round(model: Any, image: int, optimizer: Any, batches: Iterable[Batch], steps: int, rate: float) -> None:
    """Steps whose rate rises to `rate` and falls along a cosine to 0."""
    progress = Progress(steps)
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate * rate_at(step, steps)
        loss, _ = loss_of(model, batch, image)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.add(loss.item())


def held_out_loss(model: Any, course: Course) -> float:
    """Mean loss a token of answers about pictures that are never shown in the training."""
    album, chance = Album(HELD_OUT, seed=3), random.Random(4)
    with torch.inference_mode():
        found = [loss_of(model, course.about_pictures(album, chance, 1 + number % 2), course.image) for number in range(16)]
    losses, right = zip(*((loss.item(), right) for loss, right in found), strict=True)
    loss = sum(losses) / len(losses)
    print(f"  pictures held out: loss {loss:.4f}, {sum(right) / len(right):.1%} of the answers right", flush=True)
    return loss


def new_model(tokenizer: Tokenizer) -> Any:
    """transformers' model of the demo's sizes with random weights."""
    described = model_config(tokenizer)
    for part in (described, described["text_config"], described["vision_config"]):
        part["initializer_range"] = SPREAD
    config = transformers.Qwen3VLMoeConfig.from_dict(described)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    model.set_experts_implementation("eager")  # the fastest for experts this small on a CPU
    return model.train()


def published(model: Any) -> dict[str, torch.Tensor]:
    """The weights as the family publishes them: experts as `[expert, in, out]`, which transformers holds as `[expert, out, in]`."""
    tensors = model.state_dict().items()
    return {name: (value.mT if ".experts." in name else value).contiguous() for name, value in tensors}


def main() -> int:
    """See `run_training`."""
    return run_training("vision", __doc__, train)


if __name__ == "__main__":
    raise SystemExit(main())
