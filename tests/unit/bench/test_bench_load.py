"""The floor of a load by hand, the peer against transformers' own generation, and pictures."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from ep_runtime.bench import plots
from ep_runtime.bench.load_floor import FloorModel, hit_table
from ep_runtime.bench.session import random_prompts
from ep_runtime.bench.transformers_peer import CACHES, EXPERTS, FAILURES, entries, load
from ep_runtime.scheduler.core import Plan
from model.parallel import ExpertPlacement
from model.reads import WeightBytes
from model.spec import CacheSpec, LayerKind, ModelSpec, StateSpec
from protocol.commands import Span
from tests.support.checkpoints import make_checkpoint

CPU = torch.device("cpu")
PNG = b"\x89PNG"


def span(start: int, length: int, sampled: bool) -> Span:
    return Span(0, start, length, False, sampled, "last" if sampled else "none", [])


def plan(*spans: Span) -> Plan:
    return Plan(frees=(), allocs=(), spans=spans, tokens=(), owners=(), indices=())


def model(**changes: float) -> FloorModel:
    spec = ModelSpec(
        architecture="x",
        family="x",
        vocab_size=10,
        hidden_size=4,
        num_layers=2,
        layer_kinds=(LayerKind.FULL, LayerKind.SLIDING),
        caches=(CacheSpec(layer=0, kv_heads=1, head_dim=2), CacheSpec(layer=1, kv_heads=1, head_dim=2, window=3)),
        states=(StateSpec(layer=1, name="s", shape=(5,), dtype="float32"),),
        num_experts=4,
        experts_per_token=1,
        moe_layers=(0, 1),
        max_positions=100,
    )
    weights = WeightBytes(expert=1000, head=300, dense=200)
    rates = {"bandwidth": 1.0, "peak": 1e9} | changes
    return FloorModel(weights, spec, ExpertPlacement.build(4, 1), "float32", **rates)


def test_bytes_and_operations_of_a_step_by_hand() -> None:
    # Two rows: a decode row at context 8, and one row of a prompt, not sampled. Of 4 experts two rows hit 4 (1 - (3/4)^2) = 1.75.
    moved, flops = model().of_step(plan(span(7, 1, True), span(0, 1, False)))
    caches = (8 + 1) * 4 * 4 + (3 + 1) * 4 * 4
    assert moved == pytest.approx(1.75 * 2 * 1000 + 200 + 300 + caches + 2 * 2 * 5 * 4)
    assert flops == pytest.approx(2 * (2 * (200 + 2 * 1000) + 300) / 4)
    without_head, _ = model().of_step(plan(span(0, 1, False)))
    assert without_head == pytest.approx(2 * 1000 + 200 + 2 * 4 * 4 + 2 * 5 * 4)


def test_a_step_takes_the_longer_of_the_two() -> None:
    steps = [plan(span(0, 1, True)), plan(span(0, 8, True))]
    by_bytes, by_products = model().of_plans(steps), model(bandwidth=1e9, peak=1.0).of_plans(steps)
    assert by_bytes.seconds == pytest.approx(by_bytes.bytes)
    assert by_products.seconds == pytest.approx(by_products.flops)
    assert (by_bytes.rows, by_bytes.steps) == (9, 2)
    assert by_products.flops == pytest.approx(2 * (9 * 2200 + 2 * 300) / 4)


def test_many_rows_hit_all_experts_and_no_more() -> None:
    counts, hits = hit_table(ExpertPlacement.build(8, 2), 2)
    assert hits[0] == 0.0
    assert 1.0 <= hits[1] <= 2.0  # of two experts the busier rank has one or both
    assert hits == sorted(hits)
    assert hits[-1] == pytest.approx(4.0, abs=0.01)
    assert counts[1:] == [2**power for power in range(len(counts) - 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", "plain", tmp_path_factory.mktemp("peer"))


def job(folder: Path, **changes: object) -> dict:
    cells = [{"batch": 2, "prompt_len": 7, "new_tokens": 6}, {"batch": 1, "prompt_len": 7, "new_tokens": 1}]
    plain = {"model": str(folder), "load_format": "auto", "dtype": "float32", "device": "cpu", "cells": cells, "repeat": 2}
    return plain | {"given": None} | changes


def test_the_peer_says_what_generate_says(folder: Path) -> None:
    work = job(folder)
    made = load(work, CPU)
    decode, prefill = entries(work, lambda: made, CPU)
    prompt = random_prompts(2, 7, made.config.vocab_size)[0]
    expected = made.generate(
        torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None
    )[0, 7:]
    assert decode["tokens"] == expected.tolist()
    assert (
        prefill["tokens"]
        == made(torch.tensor([random_prompts(1, 7, made.config.vocab_size)[0]])).logits[0, -1:].argmax(-1).tolist()
    )
    assert len(decode["trials"]) == len(EXPERTS) * len(CACHES)
    assert decode["way"] in decode["trials"]
    assert decode["step_ms"] > 0
    assert len(prefill["all"]) == 2


def test_dummy_weights_leave_norms_as_they_are(folder: Path) -> None:
    made = load(job(folder, load_format="dummy", dtype="bfloat16"), CPU)
    assert made.dtype == torch.bfloat16
    matrices = [weight.detach() for weight in made.parameters() if weight.dim() > 1]
    assert max(float(weight.abs().max()) for weight in matrices) <= 1.01e-3
    assert min(float(weight.float().std()) for weight in matrices) > 4e-4
    assert torch.equal(made.model.norm.weight, torch.ones_like(made.model.norm.weight))


def test_a_model_that_it_does_not_know_is_an_error_of_each_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such thing", "dtype": "float32"}))
    work = job(tmp_path, load_format="dummy")
    found = entries(work, lambda: load(work, CPU), CPU)
    assert [one["batch"] for one in found] == [2, 1]
    assert all("no such thing" in one["error"] for one in found)
    assert issubclass(torch.OutOfMemoryError, FAILURES)


def test_a_shape_that_fails_is_an_error_of_that_shape(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = job(folder)
    made = load(work, CPU)
    forward = made.forward

    @functools.wraps(forward)
    def short_of_memory(input_ids: torch.Tensor, **others: object) -> object:
        if input_ids.shape[0] == 2:
            raise torch.OutOfMemoryError("2 sequences are too many")
        return forward(input_ids=input_ids, **others)

    monkeypatch.setattr(made, "forward", short_of_memory)
    decode, prefill = entries(work, lambda: made, CPU)
    assert "2 sequences are too many" in decode["error"]
    assert prefill["seconds"] > 0


def test_pictures_of_all_that_have_one(tmp_path: Path) -> None:
    common = {"model": "m", "ranks": 2}
    decode = [
        {"batch": b, "step_ms": 2.0, "p90_ms": 3.0, "floor_ms": 1.0, "split_floor_ms": 0.5, "tokens_per_s": 500.0 * b, "peer_ms": p}
        for b, p in ((1, 9.0), (8, None))
    ]
    prefill = [
        {"prompts": b, "prompt_len": 4, "tokens_per_s": 10.0, "floor_seconds": 0.1, "peer_seconds": p}
        for b, p in ((1, 0.5), (8, None))
    ]
    load_row = {
        "requests": 2,
        "prompt_len": 4,
        "new_tokens": 2,
        "seconds": 1.0,
        "floor_seconds": 0.5,
        "arrivals": [[0.5, 2], [1, 2]],
    }
    sums = [
        {"collective": c, "variant": v, "rows": n, "median_us": 5.0, "p90_us": 6.0}
        for c in ("reduce", "gather")
        for v in ("a", "b")
        for n in (1, 8)
    ]
    for result in (
        {"benchmark": "decode", "rows": decode},
        {"benchmark": "prefill", "rows": prefill},
        {"benchmark": "throughput", "rows": [load_row]},
        {"benchmark": "collectives", "rows": sums, "width": 64},
    ):
        written = tmp_path / f"{result['benchmark']}.json"
        written.write_text(json.dumps(common | result))
        picture = written.with_suffix(".png")
        plots.run(type("Options", (), {"result": written, "plot": picture}))
        assert picture.read_bytes().startswith(PNG)
    plots.save(None, {})
    with pytest.raises(ValueError, match="no picture"):
        plots.save(tmp_path / "x.png", {"benchmark": "demo"})
    with pytest.raises(ValueError, match="save-detailed"):
        plots.save(tmp_path / "x.png", {"benchmark": "serve"})
