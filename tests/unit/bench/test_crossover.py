"""Tuning data for any number of ranks: shapes of expert layers, and the way of a sum, from results to the choice."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_runtime.bench import crossover
from ep_runtime.bench.configs import PUBLISHED
from ep_runtime.bench.experts_shapes import MODELS, WORLDS
from kernels.experts_config import experts_shape
from kernels.tuning import FOLDER, Tuning, load_table, merge_entries, table_path
from model.layers.fused import FusedOperators


def shape_of(key: str) -> dict[str, int | str]:
    model = MODELS[key]
    return experts_shape(model.hidden, model.units, model.held, model.top_k, "bfloat16")


def test_every_published_model_is_tuned_for_every_number_of_ranks() -> None:
    wanted = []
    for config in PUBLISHED.values():
        sizes = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"], config["num_experts_per_tok"]
        hidden, units, experts, top_k = sizes
        wanted += [experts_shape(hidden, units, experts // world, top_k, "bfloat16") for world in (1, 2, 4, 8)]
    assert [shape_of(key) for key in MODELS] == wanted
    assert WORLDS == (1, 2, 4, 8)
    assert MODELS["80b-ep8"].held == 64


def test_what_is_tuned_are_shapes_of_these() -> None:
    entries = load_table("NVIDIA H200").entries
    shapes = [shape_of(key) for key in MODELS]
    assert all(entry.shape in shapes for entry in entries if entry.kernel == "experts")
    assert table_path("NVIDIA H200").parent == FOLDER


def collectives(ranks: int, nccl: dict[int, float], peers: dict[int, float]) -> dict[str, Any]:
    rows = [
        {"collective": name, "variant": variant, "rows": count, "median_us": time}
        for name, variant, times in (("reduce", "nccl, eager", nccl), ("reduce_rows", "default", peers))
        for count, time in times.items()
    ]
    return {"benchmark": "collectives", "device": "ACME X-1", "ranks": ranks, "width": 64, "rows": rows}


def test_the_faster_way_by_rows(tmp_path: Path) -> None:
    table = table_path("ACME X-1", tmp_path)
    old = {"kernel": "sums", "shape": {"width": 64, "world": 4, "dtype": "bfloat16"}, "rows": {"1": {"way": "nccl"}}}
    other = {"kernel": "experts", "shape": {"hidden": 64}, "rows": {"1": {}}}
    table.write_text(json.dumps({"device": "ACME X-1", "entries": [old, other]}))
    result = tmp_path / "result.json"
    measured = collectives(4, {1: 15.0, 256: 20.0, 4096: 90.0}, {1: 7.0, 256: 18.0, 4096: 120.0})
    result.write_text(json.dumps({"benchmark": "scale", "collectives": [{"ranks": 8, "failed": "x"}, measured]}))
    crossover.main([str(result), "--table", str(table)])
    found = load_table("ACME X-1", tmp_path)
    assert [entry.kernel for entry in found.entries] == ["experts", "sums"]
    shape = {"width": 64, "world": 4, "dtype": "bfloat16"}
    ways = [(found.find("sums", shape, rows) or {})["way"] for rows in (1, 200, 257, 9000)]
    assert ways == ["peers", "peers", "nccl", "nccl"]


def test_results_without_gpus_make_no_entry(tmp_path: Path) -> None:
    table, result = table_path("ACME X-1", tmp_path), tmp_path / "result.json"
    table.write_text(json.dumps({"device": "ACME X-1", "entries": []}))
    for measured in (collectives(2, {1: 1.0}, {}), collectives(2, {1: 1.0}, {1: 1.0}) | {"device": "cpu"}):
        result.write_text(json.dumps(measured))
        with pytest.raises(SystemExit, match="ACME"):
            crossover.main([str(result), "--table", str(table)])


def test_entries_take_each_other_s_place_by_kernel_and_shape() -> None:
    def entry(kernel: str, size: int, value: int) -> dict[str, Any]:
        return {"kernel": kernel, "shape": {"size": size}, "rows": {"1": {"value": value}}}

    merged = merge_entries([entry("a", 1, 0), entry("a", 2, 0), entry("b", 1, 0)], [entry("a", 2, 9), entry("c", 1, 9)])
    assert merged == [entry("a", 1, 0), entry("b", 1, 0), entry("a", 2, 9), entry("c", 1, 9)]


def test_the_table_decides_where_a_sum_goes(tmp_path: Path) -> None:
    rows = {"8": {"way": "peers"}, "64": {"way": "nccl"}}
    shape = {"width": 16, "world": 2, "dtype": "float32"}
    table_path("X", tmp_path).write_text(json.dumps({"device": "X", "entries": [{"kernel": "sums", "shape": shape, "rows": rows}]}))
    said: list[str] = []
    operators = FusedOperators(torch.device("cpu"), Tuning(load_table("X", tmp_path), said.append), pdl=False)
    memory = SimpleNamespace(world=2, fits=lambda count, width: count * width <= 1600)
    comm: Any = SimpleNamespace(peers=memory)
    batch: Any = SimpleNamespace(decode_only=False)

    def way(count: int, width: int = 16) -> object:
        return operators._peers(torch.zeros(count, width), batch, comm)

    assert [way(count) is memory for count in (1, 8, 9, 100)] == [True, True, False, False]
    assert way(101) is None
    assert way(9, 32) is memory
    assert len(said) == 1
    batch.decode_only = True
    assert [way(count) is memory for count in (9, 100, 101)] == [True, True, False]
    comm.peers = None
    assert way(1) is None
