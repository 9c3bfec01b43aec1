"""Asks a running server that serves the Trellis demo's model for complements, in each way of running loops, and judges."""

from __future__ import annotations

import random
from typing import Any

import openai

from ep_runtime.demo.client import WrongAnswer
from ep_runtime.demo.trellis_text import Question, draw_question
from ep_runtime.demo.trellis_ways import WAYS, Way

SEED = 20
"""Of the questions; those of the training have other seeds."""
ASKED = 3
"""Questions, of which each way of running loops gets every one."""


def quiz(base_url: str) -> None:
    """Ask and print. Raises `WrongAnswer`, and `openai.APIError` when the server refuses."""
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        name = client.models.list().data[0].id
        chance = random.Random(SEED)
        for question in [draw_question(chance) for _ in range(ASKED)]:
            print(f"\nQuestion: {question} (each digit taken from nine: {question.answer})", flush=True)
            for way in WAYS:
                answer, loops = answered(client, name, question, way)
                print(f"Answer:   {answer}  {way}: {loops:.2f} loops a token", flush=True)
                judge(answer, loops, question, way)


def answered(client: openai.OpenAI, model: str, question: Question, way: Way) -> tuple[str, float]:
    """The greedy answer, and the mean of loops that the server says its tokens ran: it says none where each ran one."""
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": str(question)}], temperature=0.0, max_tokens=16, extra_body=way.fields()
    )
    assert answer.usage is not None
    return (answer.choices[0].message.content or ""), mean_loops(answer.usage.model_dump())


def mean_loops(usage: dict[str, Any]) -> float:
    """`usage.completion_tokens_details.mean_loops`, 1 where it is not there."""
    details = usage.get("completion_tokens_details") or {}
    loops = details.get("mean_loops")
    return 1.0 if loops is None else float(loops)


def judge(answer: str, loops: float, question: Question, way: Way) -> None:
    """Raise `WrongAnswer` unless the answer is right and its tokens ran as many loops as this way allows."""
    if answer != question.answer:
        raise WrongAnswer(f"{question} taken from nine is {question.answer}, but the answer ({way}) is {answer!r}")
    least = 1 if way.thresholds else way.loops
    if not least <= loops <= way.loops:
        raise WrongAnswer(f"a token ran {loops:g} loops ({way}); it is to run {least} to {way.loops}")
