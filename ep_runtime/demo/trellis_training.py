"""Trains the Trellis demo's model from random weights and fills its folder.

A process of its own: `python -m ep_runtime.demo.trellis_training FOLDER`. One thread and fixed seeds, so that a machine gives the
same weights each time. A step shows conversations of several questions, alike in length, so that a batch needs no padding, and runs
one to four loops. The readout after each loop learns the answers too, and the exit head of each loop whether that readout is right.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from ep_runtime.demo.training import Progress, TrainingFailed, rate_at, run_training
from ep_runtime.demo.trellis_greedy import greedy
from ep_runtime.demo.trellis_text import END, MAX_LENGTH, Question, build_tokenizer, draw_question, render, write_text
from ep_runtime.demo.trellis_ways import WAYS, Way
from model.trellis import TrellisConfig, TrellisModel, build_model, save_checkpoint

ROUNDS = ((250, 1.0), (250, 0.5), (250, 0.5))
"""Steps and share of the highest rates; the later ones run when the target is missed, as may be where a CPU rounds otherwise."""
RATES = (0.02, 4e-3)
"""Highest learning rates: Muon's, of the matrices inside layers, and AdamW's, of the rest."""
BATCH, QUESTIONS = 8, 4
"""Conversations of a step, and questions of each."""
LOOPS = (1, 1, 2, 3, 4)
READOUTS, EXITS = 0.5, 0.1
"""What a loss of readouts and of exit heads counts beside that of the last logits."""
SPREAD = 6.0
"""How much wider the first weights are than the library's, which are for models ten times as wide as this one."""
HELD_OUT = 64
TARGET = 0.95
"""Least share of questions that were held out with every digit right, in each way of running loops."""


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens [batch, length]`, and the places `[answers]` of those that the model is to say, alike in all rows."""

    tokens: torch.Tensor
    answers: torch.Tensor


class Course:
    """Questions as tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def conversation(self, questions: Iterable[Question]) -> tuple[list[int], list[int]]:
        """Tokens of questions with their answers, one after the other, and the places of the answers."""
        ids: list[int] = []
        answers: list[int] = []
        for question in questions:
            ids += self.prompt(question)
            start = len(ids)
            ids += self.answer(question)
            answers += range(start, len(ids))
        return ids, answers

    def prompt(self, question: Question) -> list[int]:
        """Tokens of a question."""
        return list(self._tokenizer.encode(render(question)).ids)

    def answer(self, question: Question) -> list[int]:
        """Tokens of the answer."""
        return list(self._tokenizer.encode(question.answer + END).ids)

    def lessons(self, chance: random.Random) -> Iterator[Batch]:
        """The batch of each step, without end."""
        while True:
            rows = [self.conversation([draw_question(chance) for _ in range(QUESTIONS)]) for _ in range(BATCH)]
            yield Batch(torch.tensor([ids for ids, _ in rows]), torch.tensor(rows[0][1]))


def new_config(tokenizer: Tokenizer) -> TrellisConfig:
    """A Trellis of 0.3 million weights with every part of the large ones but the auxiliary heads."""
    return TrellisConfig(
        d_model=64, vocab_size=tokenizer.get_vocab_size(), core=("gdn", "sliding"), heads=4, kv_heads=2, head_dim=16, window=64,
        mlp_dim=128, gdn_heads=2, gdn_key_dim=16, gdn_value_dim=32, lora_rank=4, bank_sub_keys=32, bank_value_dim=32,
        bank_key_dim=16, bank_top_k=4, context=MAX_LENGTH, aux=None,
    )  # fmt: skip


def new_model(config: TrellisConfig) -> TrellisModel:
    """Random weights, wider than the library's; queries begin as keys, so that what is alike is found from the first step on."""
    model = build_model(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("_proj.weight", ".A")) or key == "embedding.weight":
                parameter.mul_(SPREAD * (4 if key.endswith(("o_proj.weight", "down_proj.weight")) else 1))
            elif key.endswith("_conv.weight"):
                parameter.abs_()
        for layer in model.all_layers:
            query, keys = (getattr(layer.mixer, name).weight for name in ("q_proj", "k_proj"))
            keys.copy_(query[: len(keys)])
    return model


def loss_of(model: TrellisModel, batch: Batch, loops: int, plan: list[torch.Tensor] | None) -> tuple[torch.Tensor, float]:
    """What is minimised, and the part of it that is the mean loss of the answers' tokens."""
    before, due = batch.answers - 1, batch.tokens[:, batch.answers].flatten()
    out = model(batch.tokens[:, :-1], k=loops, plan=plan)
    loss = functional.cross_entropy(out.logits[:, before].flatten(0, 1), due)
    hidden = tuple(readout.hidden[:, before] for readout in out.readouts if readout.hidden is not None)
    readouts = [model.apply_readout(rows).flatten(0, 1) for rows in hidden]
    supervised = torch.stack([functional.cross_entropy(logits, due) for logits in readouts]).mean()
    right = torch.stack([logits.argmax(-1) == due for logits in readouts]).float()
    # An exit head describes a readout and changes nothing before it.
    scores = model.exit_heads.score(tuple(rows.detach() for rows in hidden)).flatten(1)
    exits = functional.binary_cross_entropy_with_logits(scores, right)
    return loss + READOUTS * supervised + EXITS * exits, loss.item()


def random_plan(chance: random.Random, config: TrellisConfig, batch: Batch, loops: int) -> list[torch.Tensor] | None:
    """None in half of the steps: routers decide for all tokens. Otherwise what decoding may do: answers stop at any depth.

    Prompts get random tokens up to each loop's capacity. The masks are the same in all rows.
    """
    if chance.random() < 0.5:
        return None
    rows, length = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    said = {int(place) - 1 for place in batch.answers}
    all_loops = chance.random() < 0.5
    depths = {place: loops if all_loops else chance.randint(1, loops) for place in sorted(said)}
    order = [place for place in range(length) if place not in said]
    chance.shuffle(order)
    masks = []
    for loop, capacity in enumerate(config.capacities[1:loops], start=2):
        running = order[: math.ceil(capacity * len(order))] + [place for place, depth in depths.items() if depth >= loop]
        mask = torch.zeros(length, dtype=torch.bool)
        mask[running] = True
        masks.append(mask.expand(rows, -1).contiguous())
    return masks


def train(folder: Path) -> None:
    """Train until the target is met and fill the existing `folder`. Raises `TrainingFailed`."""
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    course = Course(tokenizer)
    model = new_model(new_config(tokenizer))
    optimizers = new_optimizers(model)
    chance = random.Random(1)
    lessons = course.lessons(chance)
    for steps, share in ROUNDS:
        run_round(model, optimizers, itertools.islice(lessons, steps), chance, steps, share)
        right = held_out(model, course)
        if min(right) >= TARGET:
            break
    else:
        raise TrainingFailed(f"after the last step {min(right):.1%} of what was held out is right; at least {TARGET:.0%} must be")
    save_checkpoint(model, folder)
    write_text(folder, tokenizer)


def new_optimizers(model: TrellisModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers, which takes a third of AdamW's steps here, and AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [parameter for key, parameter in named if key.endswith("_proj.weight")]
    rest = [parameter for key, parameter in named if not key.endswith("_proj.weight")]
    return [
        torch.optim.Muon(matrices, lr=RATES[0], weight_decay=0.01, momentum=0.9),
        torch.optim.AdamW(rest, lr=RATES[1], betas=(0.9, 0.98), weight_decay=0.01, fused=True),
    ]


def run_round(
    model: TrellisModel,
    optimizers: list[torch.optim.Optimizer],
    batches: Iterable[Batch],
    chance: random.Random,
    steps: int,
    share: float,
) -> list[float]:
    """Steps whose rates rise to `share` of the highest and fall to 0; the loss of each."""
    progress = Progress(steps)
    for step, batch in enumerate(batches):
        for optimizer, rate in zip(optimizers, RATES, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * share * rate_at(step, steps)
        loops = chance.choice(LOOPS)
        loss, answers = loss_of(model, batch, loops, random_plan(chance, model.config, batch, loops))
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        progress.add(answers)
    return progress.seen


def held_out(model: TrellisModel, course: Course) -> list[float]:
    """In each way of running loops, the share of questions, of seeds that the training has not, that are answered rightly."""
    chance = random.Random(2)
    questions = [draw_question(chance) for _ in range(HELD_OUT)]
    prompts, due = (torch.tensor([ids(one) for one in questions]) for ids in (course.prompt, course.answer))
    return [judged(model, prompts, due, way) for way in WAYS]


def judged(model: TrellisModel, prompts: torch.Tensor, due: torch.Tensor, way: Way) -> float:
    """The share of prompts after which the model says what is due, printed with the mean of loops."""
    found = greedy(model, prompts, due.shape[1], way.loops, way.thresholds)
    right = (found.tokens == due).all(1).float().mean().item()
    loops = found.depths[:, 1:].float().mean().item()
    print(f"  questions held out, {way}: {right:.1%} right, {loops:.2f} loops a token", flush=True)
    return right


def main() -> int:
    """See `run_training`."""
    return run_training("trellis", __doc__, train)


if __name__ == "__main__":
    raise SystemExit(main())
