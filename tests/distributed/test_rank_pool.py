"""The rank pool: values, failures, deaths and hangs come back as such, and the pool goes on."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.python_path import python_path
from tests.support.ranks import RankPool, RanksFailed

CASES = "tests.distributed.pool_cases:"


def test_all_tests_of_the_pool_run_on_one_worker(ranks: RankPool, request: pytest.FixtureRequest) -> None:
    """Tests that are spread by group have it in their ids. Pools on two workers would be twice as many processes."""
    grouped = request.config.getoption("loadgroup", default=False)
    assert request.node.nodeid.endswith("@ranks") == grouped


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_each_rank_runs_the_function_and_returns_its_value(ranks: RankPool, world: int) -> None:
    values = ranks.run(world, CASES + "describe", text="ä", number=2**60, nested={"a": [1, None, 2.5]})
    assert [value["rank"] for value in values] == list(range(world))
    assert {(value["world"], value["threads"], value["same"]) for value in values} == {(world, 1, True)}
    assert values[0]["kwargs"] == {"text": "ä", "number": 2**60, "nested": {"a": [1, None, 2.5]}}
    assert len({value["pid"] for value in values}) == world
    assert len({value["dir"] for value in values}) == 1
    assert not Path(values[0]["dir"]).exists()
    again = ranks.run(world, CASES + "describe")
    assert [value["pid"] for value in again] == [value["pid"] for value in values]
    assert again[0]["epoch"] > values[0]["epoch"]


def test_arrays_travel_both_ways(ranks: RankPool) -> None:
    values = np.arange(12, dtype=np.int16).reshape(3, 4)
    for result in ranks.run(2, CASES + "arrays", values=values):
        assert result["doubled"].dtype == np.int16
        np.testing.assert_array_equal(result["doubled"], values * 2)
        np.testing.assert_array_equal(result["strided"], values.T)
        assert result["empty"].shape == (0, 3)
        assert result["scalar"] == 66


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sums_over_gloo(ranks: RankPool, world: int) -> None:
    total = sum(range(1, world + 1))
    for factor in (10, 100):
        assert ranks.run(world, CASES + "gloo_sum", factor=factor) == [[total, factor * total]] * world


def test_each_job_has_a_store_of_its_own(ranks: RankPool) -> None:
    first, second = (ranks.run(3, CASES + "store_exchange") for _ in range(2))
    assert first[0] == first[1] == first[2]
    assert first[0] != second[0]


def test_exceptions_of_all_ranks_come_back(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks.run(3, CASES + "fail_on", failing=[0, 2])
    text = str(caught.value)
    assert "rank 0 raised, rank 2 raised" in text
    for rank in (0, 2):
        assert f"ValueError: broken on purpose on rank {rank}" in text
    assert text.count("in fail_on") == 2
    assert "some last words" in text
    outcomes = ranks.outcomes(3, CASES + "fail_on", failing=[1])
    assert [outcome.kind for outcome in outcomes] == ["returned", "raised", "returned"]
    assert outcomes[0].value == "fine"


def test_a_missing_function_and_a_value_that_is_not_plain_data_are_exceptions(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"AttributeError.*no_such_function"):
        ranks.run(1, CASES + "no_such_function")
    with pytest.raises(RanksFailed, match="Tensor is not plain data"):
        ranks.run(1, CASES + "not_plain_data")
    with pytest.raises(ValueError, match="world 5"):
        ranks.run(5, CASES + "describe")


def test_ranks_that_wait_for_a_failed_one_end_with_its_grace(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks.run(2, CASES + "fail_while_others_wait", grace=0.2)
    assert "left the others alone" in str(caught.value)
    assert ranks.run(2, CASES + "gloo_sum", factor=2) == [[3, 6]] * 2


@pytest.mark.parametrize(("how", "cause"), [("SIGKILL", "SIGKILL"), ("exit", "exit status 7")])
def test_a_rank_that_dies_is_reported_and_replaced(ranks: RankPool, how: str, cause: str) -> None:
    before = [value["pid"] for value in ranks.run(2, CASES + "describe")]
    outcomes = ranks.outcomes(2, CASES + "die", how=how)
    assert [outcome.kind for outcome in outcomes] == ["returned", "died"]
    assert cause in outcomes[1].detail
    after = [value["pid"] for value in ranks.run(2, CASES + "describe")]
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_leaving_by_systemexit_is_an_exception_not_a_death(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(1, CASES + "die", how="SystemExit")
    assert outcomes[0].kind == "raised"
    assert "SystemExit" in outcomes[0].value


def test_a_rank_killed_between_jobs_is_replaced(ranks: RankPool) -> None:
    ranks.run(2, CASES + "describe")
    watch = os.pidfd_open(ranks.pids[1])
    os.kill(ranks.pids[1], 9)
    select.select([watch], [], [])
    os.close(watch)
    assert ranks.run(2, CASES + "gloo_sum", factor=1) == [[3, 3]] * 2


def test_a_hang_is_reported_with_its_place_and_ends(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(2, CASES + "hang_here_forever", grace=0.2, rank=1)
    assert [outcome.kind for outcome in outcomes] == ["raised", "hung"]
    assert "in hang_here_forever" in outcomes[1].detail
    assert ranks.run(2, CASES + "gloo_sum", factor=1) == [[3, 3]] * 2


def test_a_hang_inside_a_collective_or_a_stopped_process_ends(ranks: RankPool) -> None:
    outcomes = ranks.outcomes(2, CASES + "hang_in_collective", deadline=4.0)
    assert [outcome.kind for outcome in outcomes] == ["hung", "hung"]
    assert "in broadcast" in outcomes[0].detail
    (outcome,) = ranks.outcomes(1, CASES + "stop_itself", deadline=1.0)
    assert (outcome.kind, outcome.detail.strip()) == ("hung", "no stack dump: the process is stopped")


def wait_until_gone(pid: int) -> None:
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([watch], [], [], 20)[0], f"process {pid} is still there"
    finally:
        os.close(watch)


def test_what_a_dead_rank_had_started_ends_with_it(ranks: RankPool) -> None:
    (outcome,) = ranks.outcomes(1, CASES + "leave_a_child")
    assert outcome.kind == "died"
    words = outcome.detail.split()
    wait_until_gone(int(words[words.index("child") + 1]))


def test_no_process_is_left_when_the_pool_closes() -> None:
    with RankPool(size=1) as pool:
        pool.run(1, CASES + "describe")
        (pid,) = pool.pids
    wait_until_gone(pid)


def test_no_process_is_left_when_the_pool_is_killed() -> None:
    script = (
        "import os, signal\n"
        "from tests.support.ranks import RankPool\n"
        "pool = RankPool(size=1)\n"
        f"pool.run(1, {CASES + 'describe'!r})\n"
        "print(pool.pids[0], pool._dir, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=os.environ | {"PYTHONPATH": python_path()}, stdout=subprocess.PIPE, check=False
    )
    pid, directory = done.stdout.split()
    assert done.returncode == -9
    wait_until_gone(int(pid))
    for leftover in Path(directory.decode()).iterdir():
        leftover.unlink()
    Path(directory.decode()).rmdir()
