"""Waves of requests that together bring steps of every kind: of prompts, whole and in pieces, beside decoding and alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SIZES = {"max_num_seqs": 6, "max_num_batched_tokens": 272, "max_model_len": 512}
"""The engine's, for which these waves are."""

KINDS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_p": 0.9}, {"prompt_logprobs": 1}]
LENGTHS = [[1], [2, 3], [300, 1, 5, 17], [9], [64, 65, 128, 129, 2], [33], [257, 256, 255], [100, 7, 3, 1, 1, 1]]

TURNS = 4
"""Of the head, between two waves: the waves overlap."""


def waves_of(prompt: Callable[[int, int], list[int]]) -> list[list[dict[str, Any]]]:
    """Greedy and drawn, scored and not; `prompt(length, seed)` gives the tokens."""
    return [
        [{"prompt": prompt(n, n), "max_tokens": 3 + place, **KINDS[(wave + place) % 3]} for place, n in enumerate(each)]
        for wave, each in enumerate(LENGTHS)
    ]
