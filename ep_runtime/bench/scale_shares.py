"""Where a step of several ranks loses: the share of collectives in it, and how unevenly its experts lie on the ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ep_runtime.bench import decode
from ep_runtime.bench.session import MeasuredLLM, Session, greedy, random_prompts

COLLECTIVE = re.compile(r"(_|^)(one_shot|one_shot_words|two_shot|gather|reduce\w*|merge|send)_kernel|nccl")
"""Names of kernels that wait for other ranks: those of `kernels.peer_sums`, of a step's best and tokens, and NCCL's."""

CALLS = ("reduce", "gather_to_head", "broadcast")
GROUPS = 64
"""Batches that are put together from recorded rows."""


def collective_share(session: Session, batch: int, prompt_len: int, new_tokens: int) -> float:
    """The part of a decode step that this rank spends in collectives, waiting for the others included, from 0 to 1.

    On a GPU of the kernels' time, by the profiler; on a CPU of the time on the clock, prompts' steps included.
    """
    if session.llm.parallel.world == 1:
        return 0.0
    if session.llm.device.type == "cuda":
        return kernel_share(decode.profile(session, batch, prompt_len)["rows"])
    return _host_share(session.llm, batch, prompt_len, new_tokens)


def kernel_share(rows: Sequence[dict[str, Any]]) -> float:
    """The part of collectives in the rows of a profile."""
    total = sum(row["us_per_step"] for row in rows)
    within = sum(row["us_per_step"] for row in rows if COLLECTIVE.match(row["name"]))
    return within / total if total else 0.0


def imbalance(routing: np.ndarray, owners: np.ndarray, world: int, batch: int) -> dict[str, float]:
    """How uneven a batch is over the ranks: by rank the rows of its experts, and its experts that are hit, most over mean.

    `routing` is `[layers, rows, k]`, `owners` the rank of each expert. Means over the layers of GROUPS seeded batches of its rows.
    """
    random = np.random.default_rng(0)
    layers, rows, _ = routing.shape
    uneven_rows, uneven_hits, most_hits = [], [], []
    for _ in range(GROUPS):
        chosen = routing[:, random.choice(rows, size=batch, replace=batch > rows)]
        for layer in range(layers):
            experts = chosen[layer].ravel()
            pairs = np.bincount(owners[experts], minlength=world)
            hits = np.bincount(owners[np.unique(experts)], minlength=world)
            uneven_rows.append(pairs.max() / pairs.mean())
            uneven_hits.append(hits.max() / hits.mean())
            most_hits.append(hits.max())
    return {
        "rows_max_over_mean": float(np.mean(uneven_rows)),
        "experts_max_over_mean": float(np.mean(uneven_hits)),
        "experts_hit_busiest": float(np.mean(most_hits)),
    }


def record_routing(llm: MeasuredLLM, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """The experts that the rows of `prompts` choose: int `[layers, rows, k]`. Every rank computes the same."""
    seen: list[np.ndarray] = []
    with _watched(llm, seen):
        llm.generate([list(prompt) for prompt in prompts], greedy(1))
    if not seen:
        raise RuntimeError("no layer of this model routes")
    return np.concatenate(seen, axis=1)


def measure_imbalance(llm: MeasuredLLM, batches: Sequence[int], prompt_len: int) -> list[dict[str, Any]]:
    """A row of `imbalance` for each batch, from the routing of as many prompts as the largest has rows; none without experts."""
    placement = llm.placement
    if not llm.spec.moe_layers:
        return []
    routing = record_routing(llm, random_prompts(min(max(batches), 32), prompt_len, llm.vocab_size, seed=7))
    owners = np.array([placement.owner(expert)[0] for expert in range(placement.num_experts)])
    return [{"batch": batch, **imbalance(routing, owners, placement.world, batch)} for batch in batches]


@contextmanager
def _watched(llm: MeasuredLLM, seen: list[np.ndarray]) -> Iterator[None]:
    """Forwards that run eagerly, as prompts' do, note their routing in `seen`."""
    model = llm.model
    forward = model.forward

    def noting(batch: Any, *rest: Any) -> Any:
        batch.routing = True
        output = forward(batch, *rest)
        if output.routing is not None:
            seen.append(output.routing.cpu().numpy())
        return output

    with _replaced(model, {"forward": noting}):
        yield


def _host_share(llm: MeasuredLLM, batch: int, prompt_len: int, new_tokens: int) -> float:
    spent = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def within(*arguments: Any) -> Any:
            nonlocal spent
            began = time.perf_counter()
            result = call(*arguments)
            spent += time.perf_counter() - began
            return result

        return within

    prompts = random_prompts(batch, prompt_len, llm.vocab_size)
    with _replaced(llm.communicator, {name: timed(getattr(llm.communicator, name)) for name in CALLS}):
        began = time.perf_counter()
        llm.generate(prompts, greedy(new_tokens))
        return spent / (time.perf_counter() - began)


@contextmanager
def _replaced(owner: object, methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """These methods of one object, until the end."""
    for name, method in methods.items():
        setattr(owner, name, method)
    try:
        yield
    finally:
        for name in methods:
            delattr(owner, name)
