"""Judges the answers of a run with faults by those of a run without, and those greedy ones by transformers."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from tests.support.chaos_requests import Answer, Request, Sample
from tests.support.checkpoints import routing_margin
from tests.support.greedy import NEAR_TIE, Judged, _double, _logits, judge_greedy

LOGPROB_TOLERANCE = 1e-3
ROUTING_TIE = 1e-5
"""Gap of router logits below which rounding may choose another expert, and so other tokens."""

NAME_LENGTH = 800
"""Characters of a request in what is said of it: images are long."""


def whole(request: Request, answer: Answer) -> list[str]:
    """What is wrong with an answer by itself: every sample ends once, and nothing comes after the end."""
    where = _name(request)
    if answer.broken:
        return [f"{where}: {answer.broken}"]
    wrong = []
    if answer.ends != 1 or answer.after:
        wrong.append(f"{where}: {answer.ends} ends, {answer.after} events after the end")
    if answer.error:
        return wrong
    if answer.status != 200:
        wrong.append(f"{where}: status {answer.status} without an error")
    if sorted(answer.samples) != list(range(request.body.get("n", 1))):
        wrong.append(f"{where}: samples {sorted(answer.samples)}")
    wrong += [f"{where}: sample {i} ended {s.finishes} times" for i, s in answer.samples.items() if s.finishes != 1]
    return wrong


def judge_reference(folder: Path, requests: dict[int, Request], answers: dict[int, Answer]) -> Judged:
    """Hold the plainly greedy completions among the answers to transformers."""
    judged = Judged()
    for number, answer in sorted(answers.items()):
        body = requests[number].body
        if "prompt" in body and _plainly_greedy(body):
            judge_greedy(folder, body["prompt"], answer.samples[0].token_ids, judged)
    return judged


class Judge:
    """Compares answers of the same requests to one model folder. `ties` counts the differences that a near tie explains."""

    def __init__(self, folder: Path) -> None:
        self.ties = 0
        self.folder = folder

    def same(self, request: Request, answer: Answer, reference: Answer) -> list[str]:
        """What differs between two answers, near ties apart."""
        where = _name(request)
        wrong = []
        for index, given in sorted(reference.samples.items()):
            found = answer.sample(index)
            if found.token_ids != given.token_ids:
                if not self._near_tie(request, request.body.get("prompt", reference.prompt_ids), found, given):
                    wrong.append(f"{where}: sample {index} is\n{found.token_ids}, not\n{given.token_ids}")
                continue
            if (found.text, found.finish, found.stop_reason) != (given.text, given.finish, given.stop_reason):
                wrong.append(f"{where}: sample {index} is {found}, not {given}")
            elif not _close(found.logprobs, given.logprobs) or not _close(found.prompt_logprobs, given.prompt_logprobs):
                wrong.append(f"{where}: the logprobs of sample {index} are in {found}, not as in {given}")
        return wrong

    def margin(self, request: Request, prompt: list[int], then: list[int]) -> float:
        """`routing_margin` of the prompt and the tokens `then` after it."""
        return routing_margin(self.folder, prompt + then)

    def logits(self, request: Request, prompt: list[int], then: list[int]) -> torch.Tensor:
        """transformers' logits `[vocab]` after them."""
        return _logits(_double(self.folder), prompt + then)[-1]

    def _near_tie(self, request: Request, prompt: list[int], found: Sample, given: Sample) -> bool:
        """Whether the first token that differs is one that rounding may decide; what follows it follows from it."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(found.token_ids, given.token_ids, strict=False))
        place = sum(1 for _ in same)
        if not prompt or place == min(len(found.token_ids), len(given.token_ids)):
            return False
        then = given.token_ids[:place]
        tie = self.margin(request, prompt, then) < ROUTING_TIE
        if not tie and _plainly_greedy(request.body):
            logits = self.logits(request, prompt, then)
            top, second = logits.topk(2).values.tolist()
            tie = max(top - second, top - logits[found.token_ids[place]].item()) < NEAR_TIE
        self.ties += tie
        return tie


def judge_answers(judge: Judge, requests: dict[int, Request], answers: dict[int, Answer], reference: dict[int, Answer]) -> None:
    """Every answer is whole and as without faults; only a request that ran alone may have failed."""
    assert sorted(answers) == sorted(requests)
    wrong = [line for number, answer in answers.items() for line in whole(requests[number], answer)]
    failed = [answer.error for answer in answers.values() if answer.error]
    for number, answer in sorted(answers.items()):
        if not answer.error:
            wrong += judge.same(requests[number], answer, reference[number])
    assert wrong == [], "\n".join(wrong)
    assert all("alone" in error and "SIGKILL" not in error for error in failed), failed
    print(f"near ties: {judge.ties}, failed alone: {failed}")


def _name(request: Request) -> str:
    return f"request {request.number} ({str(request.body)[:NAME_LENGTH]})"


def _plainly_greedy(body: dict[str, Any]) -> bool:
    """Whether each token is the likeliest by the model's own distribution."""
    bent = ("presence_penalty", "logit_bias", "response_format")
    return body.get("temperature") == 0.0 and not any(name in body for name in bent)


def _close(found: list[float], given: list[float]) -> bool:
    if len(found) != len(given):
        return False
    return not given or torch.allclose(torch.tensor(found), torch.tensor(given), rtol=0.0, atol=LOGPROB_TOLERANCE)
