"""The cost model: its parts by hand, its constants from steps that they made, and both it and its page against recorded results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ep_runtime.bench.cost import (
    LAYOUTS,
    Case,
    Fitted,
    Load,
    Measured,
    ModelCosts,
    collective_us,
    collectives,
    decode_step,
    fit,
    fit_prompts,
    mixing_share,
    padding,
    prefill_flops,
    prefill_seconds,
    rank_bytes,
)
from ep_runtime.bench.cost_check import WITHIN, check, check_loads, refit, refit_prompts, worst
from ep_runtime.bench.cost_doc import SHARES, filled, tables
from ep_runtime.bench.cost_models import known_models, load_machine, read_loads, read_records, read_results, save_machine
from ep_runtime.bench.cost_shares import MACHINE, check_shares, share_loads
from ep_runtime.config import ATTENTION_LAYOUTS
from model.spec import LayerKind
from tests.support.cost_machine import PLAIN

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def models() -> dict[str, ModelCosts]:
    return known_models()


def test_layouts_that_are_served_are_known() -> None:
    assert set(ATTENTION_LAYOUTS) <= set(LAYOUTS)


def test_bytes_of_layouts(models: dict[str, ModelCosts]) -> None:
    hybrid = models["qwen3-next-80b-a3b"]
    everywhere = rank_bytes(hybrid, Case(batch=10, per_host=4))
    split = rank_bytes(hybrid, Case(batch=10, per_host=4, layout="tensor"))
    owned = rank_bytes(hybrid, Case(batch=10, per_host=4, layout="data"))
    # The router of 512 experts and a shared expert of 512 units, in each of 48 layers of width 2048, in bfloat16.
    undivided = 48 * 2048 * 2 * (512 + 3 * 512)
    assert split.dense == undivided + (everywhere.dense - undivided) // 4
    assert split.cache == everywhere.cache // 2  # two key/value heads
    assert split.state == everywhere.state // 4
    assert (owned.dense, owned.cache, owned.state) == (everywhere.dense, everywhere.cache * 3 // 10, everywhere.state * 3 // 10)
    assert split.experts == owned.experts == everywhere.experts
    assert split.head == owned.head == everywhere.head
    with pytest.raises(ValueError, match="sideways"):
        rank_bytes(hybrid, Case(batch=1, layout="sideways"))


def test_collectives_by_hand(models: dict[str, ModelCosts]) -> None:
    model = models["qwen3-30b-a3b"]
    assert [collectives(model, "replicated", world) for world in (1, 2, 8)] == [0, 48, 48]
    assert collectives(model, "tensor", 2) == collectives(model, "data", 2) == 96
    megabyte = 1e6
    assert collective_us(PLAIN, Case(batch=1), megabyte) == 0
    assert collective_us(PLAIN, Case(batch=1, per_host=2), megabyte) == pytest.approx(8 + 10)
    # Four ranks: up to 85 rows in words, twice the bytes from each of three; then two shots.
    assert collective_us(PLAIN, Case(batch=85, per_host=4), megabyte) == pytest.approx(8 + 2 * 2 + 2 * 30)
    assert collective_us(PLAIN, Case(batch=86, per_host=4), megabyte) == pytest.approx(2 * (8 + 2 * 2) + 2 * 3 / 4 * 10)
    # Rows that stay: of 85 rows the busiest rank keeps 22, which each of three peers has a part of; of 86 as many, in tiles.
    assert [collectives(model, "data", world, stay=True) for world in (1, 2)] == [0, 97]
    stay = Case(batch=85, per_host=4, layout="data", stay=True)
    assert collective_us(PLAIN, stay, megabyte) == pytest.approx(8 + 2 * 2 + 2 * 30 * 22 / 85)
    assert collective_us(PLAIN, replace(stay, batch=86), megabyte) == pytest.approx(8 + 2 * 2 + 30 * 22 / 86)
    assert collective_us(PLAIN, replace(stay, batch=1, per_host=2), megabyte) == pytest.approx(8 + 10)
    flat = Case(batch=1, per_host=4, hosts=3)
    assert collective_us(PLAIN, flat, megabyte) == pytest.approx(12 + 11 * 10 + 30 + 2 * 100)
    assert collective_us(PLAIN, replace(flat, by_host=True), megabyte) == pytest.approx(2 * (12 + 3 * 10 / 4) + 30 + 2 * 100 / 4)


def test_a_step_is_the_sum_of_its_parts(models: dict[str, ModelCosts]) -> None:
    model = models["qwen3.5-35b-a3b"]
    case = Case(batch=4, per_host=2)
    step = decode_step(PLAIN, model, case)
    assert step.floor == pytest.approx(rank_bytes(model, case).total / 1e9)
    assert step.layers == pytest.approx((10 * 10 + 30 * 20 + 40 * 3) / 1e3)
    assert step.rows == pytest.approx(40 * 4 * 0.5 / 1e3)
    assert step.collectives == pytest.approx(40 * (8 + 4 * 2048 * 2 / 1e11 * 1e6) / 1e3)
    assert step.total == step.device == pytest.approx(step.floor + step.layers + step.rows + step.collectives)
    assert decode_step(PLAIN, model, replace(case, batch=2)).layers == pytest.approx((10 * 10 + 30 * 20) / 1e3)
    slow = replace(PLAIN, links=replace(PLAIN.links, launch=1e6))
    assert decode_step(slow, model, replace(case, graph=False)).total == pytest.approx(40 * 1e6 / 1e3)


def test_prompts(models: dict[str, ModelCosts]) -> None:
    model = models["qwen3-30b-a3b"]
    # About 3.3 billion weights act on a token, 0.3 billion of them in the head, which prompt rows but the last do not meet.
    assert prefill_flops(model, 1, 0, 1.0) / 2 == pytest.approx(2.7e9, rel=0.05)
    # 48 layers of 32 heads of 128, two products of a query with each of 500 positions.
    attention = prefill_flops(model, 1, 1000, 1.0) - prefill_flops(model, 1, 0, 1.0)
    assert attention == 48 * 2 * 2 * 32 * 128 * 500
    assert prefill_flops(model, 4, 1000, 0.25) * 4 == pytest.approx(prefill_flops(model, 1, 1000, 1.0), rel=0.05)
    assert prefill_flops(model, 4, 1000, 1.0) - prefill_flops(model, 4, 0, 1.0) == attention
    alone = prefill_seconds(PLAIN, model, Case(batch=1), rows=9000, step_rows=8192)
    full, last = (count * prefill_flops(model, 1, 160, 1.0, padding(model, count)) for count in (8192, 808))
    assert alone == pytest.approx(2 * 0.01 + (full + last) / 1e14)
    hybrid = models["qwen3.5-35b-a3b"]
    padded = padding(hybrid, 100)
    one = prefill_seconds(PLAIN, hybrid, Case(batch=1, per_host=8, alone=True), rows=100, step_rows=8192)
    assert one == pytest.approx(0.01 + 100 * (prefill_flops(hybrid, 8, 160, 1.0, padded) / 1e14 + 30 * 1e-8))
    fewer = prefill_seconds(PLAIN, hybrid, Case(batch=1, per_host=8, alone=True, layout="tensor"), rows=100, step_rows=8192)
    assert fewer == pytest.approx(0.01 + 100 * (prefill_flops(hybrid, 8, 160, 1 / 8, padded) / 1e14 + 30 * 1e-8 / 8))
    two = prefill_seconds(PLAIN, model, Case(batch=1, per_host=2), rows=100, step_rows=8192)
    assert two == pytest.approx(0.01 + 100 * prefill_flops(model, 2, 160, 1.0, padding(model, 100)) / 1e14 + 48 * 100 * 4096 / 1e11)
    # Prompts of 25 positions on four ranks: each keeps one of four; of two the busiest keeps as much as two shots are for.
    part, data = 100 * 4096, Case(batch=1, context=25, per_host=4, layout="data")
    for rows, moved in ((100, 97 * 3 / 4 * part), (50, 96 * 2 * 3 / 4 * part / 2)):
        apart, sums = (
            prefill_seconds(PLAIN, model, replace(data, stay=True, alone=alone), rows=rows, step_rows=8192)
            for alone in (True, False)
        )
        assert sums - apart == pytest.approx(moved / 1e11)


def test_whose_prompts_a_step_waits_for() -> None:
    whole = Case(batch=1, context=100, per_host=2)
    assert mixing_share(whole, 400, 150) == 1.0
    assert mixing_share(replace(whole, layout="tensor"), 400, 150) == 0.5
    divided = replace(whole, layout="data")
    assert mixing_share(divided, 100, 150) == 1.0
    assert mixing_share(divided, 200, 1000) == 0.5
    # Steps of 150, 150 and 100 rows: 100 of the first prompt, 100 of the third, all of the last.
    assert mixing_share(divided, 400, 150) == (100 + 100 + 100) / 400
    assert mixing_share(replace(divided, per_host=3), 400, 1000) == 0.5


@pytest.mark.parametrize(("name", "rows"), [("qwen3-30b-a3b", 4096), ("qwen3-next-80b-a3b", 4096), ("qwen3-next-80b-a3b", 11776)])
def test_padding_is_that_of_rows_that_choose_evenly(models: dict[str, ModelCosts], name: str, rows: int) -> None:
    moe = models[name].config.moe
    assert moe is not None
    random = np.random.default_rng(0)
    choices = random.random((rows, moe.num_experts)).argpartition(moe.top_k, axis=1)[:, : moe.top_k]
    counts = np.bincount(choices.ravel(), minlength=moe.num_experts)
    assert padding(models[name], rows) == pytest.approx((-(-counts // 128) * 128).sum() / counts.sum(), rel=0.03)
    assert padding(models[name], 1) == pytest.approx(128, rel=0.05)
    assert padding(models[name], 0) == 1.0


def test_constants_are_found_in_the_steps_that_they_made(models: dict[str, ModelCosts]) -> None:
    cases = [
        (models[name], Case(batch=batch, per_host=world))
        for name in ("qwen3-30b-a3b", "qwen3-next-80b-a3b")
        for world in (1, 2)
        for batch in (1, 8, 32)
    ]
    steps = [
        Measured(model=model, case=case, milliseconds=decode_step(PLAIN, model, case).total, bandwidth=PLAIN.bandwidth)
        for model, case in cases
    ]
    other = replace(PLAIN, fitted=Fitted(attention=0, delta=0, grouping=0, row=0))
    found = fit(other, steps)
    assert [getattr(found, name) for name in Fitted.__slots__] == pytest.approx([10.0, 20.0, 3.0, 0.5])
    with pytest.raises(ValueError, match="do not determine"):
        fit(other, [step for step in steps if step.model.layers(LayerKind.LINEAR) == 0])


def test_constants_of_prompts_are_found_in_the_loads_that_they_made(models: dict[str, ModelCosts]) -> None:
    loads = []
    for name, layout, requests in (
        ("qwen3-30b-a3b", "tensor", 1),
        ("qwen3-30b-a3b", "replicated", 8),
        ("qwen3.5-35b-a3b", "tensor", 3),
    ):
        case = Case(batch=requests, context=4096, per_host=2, layout=layout)
        seconds = prefill_seconds(PLAIN, models[name], case, rows=requests * 4096, step_rows=8192)
        loads.append(
            Load(model=models[name], case=case, requests=requests, prompt_len=4096, new_tokens=1, seconds=seconds, step_rows=8192)
        )
    found = fit_prompts(replace(PLAIN, prefill_rate=1.0, prefill_fixed=9.0, prefill_delta=5.0), loads)
    assert (found.prefill_rate, found.prefill_fixed, found.prefill_delta) == pytest.approx((1e14, 0.01, 1e-8))
    with pytest.raises(ValueError, match="do not determine"):
        fit_prompts(PLAIN, loads[:1])


def test_loads_are_read_from_what_benchmarks_write(models: dict[str, ModelCosts]) -> None:
    about = {"model": "qwen3-30b-a3b", "ranks": 2, "attention_layout": "tensor"}
    prompts = {"prompts": 8, "prompt_len": 4096, "seconds": 0.3}
    requests = {"requests": 300, "prompt_len": 1024, "new_tokens": 256, "seconds": 6.0}
    part = {**about, "prefill": [prompts], "throughput": requests, "decode": []}
    results: dict[str, dict[str, Any]] = {
        "a": {"benchmark": "prefill", **about, "rows": [prompts]},
        "b": {"benchmark": "throughput", **about, "rows": [requests]},
        "c": {"benchmark": "scale", "parts": [part, {**about, "skipped": "too large"}, {**part, "model": "unknown"}]},
        "d": {"benchmark": "collectives", "rows": [1]},
    }
    loads = read_loads(results, models)
    assert loads[:2] == loads[2:]
    assert (loads[0].rows, loads[0].new_tokens, loads[0].case.layout) == (8 * 4096, 1, "tensor")
    assert (loads[1].case.batch, loads[1].case.context, loads[1].seconds) == (256, 1024 + 128, 6.0)
    stayed = {"benchmark": "prefill", **about, "attention_layout": "data", "rows_stay": True, "rows": [prompts]}
    assert [load.case.stay for load in (*loads, *read_loads({"e": stayed}, models))] == [False] * 4 + [True]


def test_a_machine_is_read_as_it_was_kept(tmp_path: Path) -> None:
    save_machine(PLAIN, tmp_path / "x.json")
    assert load_machine("x", tmp_path) == PLAIN


def test_against_recorded_results(models: dict[str, ModelCosts]) -> None:
    results = read_results(sorted((DOCS / "benchmarks" / "data").glob("*.json")))
    records = read_records(results, models)
    machine = load_machine(MACHINE)
    for record in records:
        assert rank_bytes(record.step.model, record.step.case).total == pytest.approx(record.bytes, rel=0.015)
    again = refit(machine, records)
    for name in Fitted.__slots__:
        assert getattr(machine.fitted, name) == pytest.approx(getattr(again, name), abs=0.006), "run: bench cost --fit"
    shares = results[SHARES]
    assert machine == refit_prompts(machine, [*read_loads(results, models), *share_loads(models, shares)])
    rows = check(machine, records)
    assert len([row for row in rows if row["steady"]]) >= 10
    assert worst(rows, "off") < WITHIN
    assert worst(rows, "others_off") < WITHIN
    assert {(part["model"], part["ranks"]) for part in shares["parts"]} >= {(name, 8) for name in models}
    assert all(abs(row["off"]) < WITHIN for row in check_shares(machine, models, shares))
    assert all(abs(row["off"]) < WITHIN for row in check_loads(machine, read_loads(results, models)))
    for part in shares["parts"]:
        for step in part["decode"]:
            case = Case(batch=step["batch"], context=step["context"], per_host=part["ranks"], layout=part["attention_layout"])
            counted = replace(case, hits=step["hits"])
            moved = rank_bytes(models[part["model"]], counted).total
            assert moved == pytest.approx(sum(step["bytes"].values()), rel=0.1)
    page = (DOCS / "scaling.md").read_text(encoding="utf-8")
    assert filled(page, tables(machine, models, results)) == page, "run: bench cost --page docs/scaling.md"


def test_a_page_must_have_the_tables_that_are_made() -> None:
    page = "a\n<!-- table one -->\nold\n<!-- end -->\nb\n"
    assert filled(page, {"one": "new\n"}) == "a\n<!-- table one -->\nnew\n<!-- end -->\nb\n"
    for made in ({}, {"one": "", "two": ""}):
        with pytest.raises(ValueError, match="tables"):
            filled(page, made)
