"""Survivors on GPUs: who leaves a dead peer keeps its process, device and weights, and the tokens stay what they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.gpu.recovery_cases import ROUNDS
from tests.support import chaos_engine
from tests.support.checkpoints import make_checkpoint, prompt
from tests.support.engine_fleet import Fleet, Request, settings_of
from tests.support.greedy import Judged, judge_greedy
from tests.support.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

CASES = "tests.gpu.recovery_cases:"
NEW_TOKENS = 60
PROMPTS = [prompt(length, seed=7) for length in (3, 17, 64)]
PATIENCE_SECONDS = 300.0
"""A first epoch compiles its kernels."""
LEAVE_SECONDS = 2.0
"""What the coordinator gives an engine."""
SLACK_BYTES = 64 << 20


@pytest.mark.parametrize(("rows", "shared"), [(8, False), (8, True), (2000, True)], ids=["nccl", "peer-memory", "many rows"])
def test_a_collective_whose_peer_is_dead_is_left_with_the_device_as_it_was(ranks: RankPool, rows: int, shared: bool) -> None:
    assert ROUNDS > 0
    survivor, dead = ranks.outcomes(2, CASES + "leave_a_dead_peer", rows=rows, shared=shared, deadline=PATIENCE_SECONDS, grace=60.0)
    assert dead.kind == "died"
    assert survivor.kind == "returned", survivor.detail
    seconds = survivor.value.pop("seconds")
    assert survivor.value == {"in_flight": True, "done": True, "kept": True, "works": True}
    assert seconds < LEAVE_SECONDS


def test_a_graph_of_an_earlier_epoch_sums_right_in_the_next(ranks: RankPool) -> None:
    epochs = 3
    found = ranks.run(2, CASES + "keep_a_graph", epochs=epochs, deadline=PATIENCE_SECONDS)
    expected = [2 * (100 * epoch + 10 * number) + 1.0 for epoch in range(epochs) for number in range(3)]
    for sums in found:
        assert sums == [[value, value] for value in expected]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", "yarn", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", params=["reference", "eager", "graph"])
def fleet(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two engines, in float32; their sums are NCCL's in mode `reference`, and go through peer memory otherwise."""
    config = settings_of(folder, 2, "cuda", dtype="float32", forward_mode=request.param, num_blocks=600)
    with closing(
        Fleet(tmp_path_factory.mktemp("run"), config, 2, module="tests.support.faulty_engine", patience=PATIENCE_SECONDS)
    ) as fleet:
        fleet.load()
        yield fleet


@pytest.fixture(scope="module")
def calm(fleet: Fleet, folder: Path) -> list[list[int]]:
    """The tokens of a run that nothing disturbs; transformers has the same, near ties apart."""
    fleet.begin()
    tokens = fleet.run(PROMPTS, NEW_TOKENS)
    judged = Judged()
    for ids, generated in zip(PROMPTS, tokens, strict=True):
        judge_greedy(folder, ids, generated, judged)
    assert judged.ties <= 1
    assert set(fleet.end()) == {0, 1}
    return tokens


def disturb(fleet: Fleet, calm: list[list[int]], fault: Callable[[Fleet], None]) -> list[int]:
    """A fault in the middle of decoding, and the epoch after it. Survivors keep their process; the ranks that did not."""
    fleet.begin()
    fleet.frontend.requests.clear()
    requests = {f"{fleet.epoch}-{number}": Request(ids, NEW_TOKENS) for number, ids in enumerate(PROMPTS)}
    fleet.frontend.submit(requests)
    fleet.frontend.pump_until(8)
    fault(fleet)
    fleet.evidence()
    before = {engine.rank: engine.pid for engine in fleet.alive()}
    seconds = fleet.end()
    assert set(seconds) == set(before), fleet.logs()
    assert max(seconds.values()) < LEAVE_SECONDS
    dead = fleet.replace_dead()
    assert {engine.rank: engine.pid for engine in fleet.engines if engine.rank not in dead} == before
    fleet.begin()
    fleet.frontend.replay()
    fleet.frontend.finish()
    assert [(request.finish, request.error) for request in requests.values()] == [("length", None)] * len(requests)
    assert [request.tokens for request in requests.values()] == calm
    assert set(fleet.end()) == {0, 1}
    return dead


@pytest.mark.parametrize("rank", [1, 0])
def test_a_survivor_keeps_its_weights_and_serves_the_next_epoch(fleet: Fleet, calm: list[list[int]], rank: int) -> None:
    assert disturb(fleet, calm, lambda fleet: fleet.engines[rank].kill()) == [rank]


@pytest.mark.parametrize(("kind", "rank"), [("close", 1), ("execute", 0), ("execute", 1), ("corrupt", 0)])
def test_a_fault_of_one_rank_ends_the_epoch_and_no_process(fleet: Fleet, calm: list[list[int]], kind: str, rank: int) -> None:
    assert disturb(fleet, calm, lambda fleet: chaos_engine.arm(fleet.runtime_dir, kind, rank, {})) == []


def test_epochs_leave_no_memory_behind(fleet: Fleet, calm: list[list[int]]) -> None:
    used = []
    for _ in range(8):
        fleet.begin()
        assert fleet.run(PROMPTS, NEW_TOKENS) == calm
        assert set(fleet.end()) == {0, 1}
        used.append([_used(index) for index in range(2)])
    for index in range(2):
        assert used[-1][index] - used[2][index] < SLACK_BYTES, [at[index] for at in used]


def _used(index: int) -> int:
    """Bytes of a device that any process holds."""
    free, total = torch.cuda.mem_get_info(index)
    return total - free
