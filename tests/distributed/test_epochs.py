"""Engines survive their epochs: whatever ends one, survivors keep their process, and the tokens are those of a calm run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import Report
from tests.support import chaos_engine
from tests.support.checkpoints import prompt
from tests.support.engine_fleet import Fleet, Request, settings_of
from tests.support.greedy import Judged, judge_greedy

WORLD = 3
NEW_TOKENS = 40
PROMPTS = [prompt(length, seed=7) for length in (3, 17, 30, 64)]
LEAVE_SECONDS = 5.0
"""20 ms are due, of a machine that does nothing else. A wait that nothing ends takes half a minute and more."""


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str, str], Path]) -> Path:
    return checkpoint("qwen3_next", "plain")


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = settings_of(folder, WORLD, num_blocks=600, command_timeout=30.0)
    with closing(Fleet(tmp_path_factory.mktemp("run"), config, WORLD, module="tests.support.faulty_engine")) as fleet:
        fleet.stand_by(range(WORLD))
        fleet.load()
        yield fleet


@pytest.fixture(scope="module")
def calm(fleet: Fleet, folder: Path) -> list[list[int]]:
    """The tokens of a run that nothing disturbs. transformers has the same."""
    fleet.begin()
    tokens = fleet.run(PROMPTS, NEW_TOKENS)
    assert set(fleet.end()) == set(range(WORLD))
    judged = Judged()
    for ids, generated in zip(PROMPTS, tokens, strict=True):
        judge_greedy(folder, ids, generated, judged)
    assert (judged.tokens, judged.ties) == (len(PROMPTS) * NEW_TOKENS, 0)
    return tokens


def arm(fleet: Fleet, kind: str, *ranks: int, **arguments: Any) -> None:
    """Have these ranks meet a fault of `faulty_engine`, once."""
    for rank in ranks:
        chaos_engine.arm(fleet.runtime_dir, kind, rank, arguments)


def start_requests(fleet: Fleet) -> list[Request]:
    """Form an epoch and have every request in the middle of its answer."""
    fleet.begin()
    fleet.frontend.requests.clear()
    for engine in fleet.engines:
        engine.reports.clear()  # at an ordered end, too, a rank may notice that another has left before it is told
    requests = {f"{fleet.epoch}-{number}": Request(ids, NEW_TOKENS) for number, ids in enumerate(PROMPTS)}
    fleet.frontend.submit(requests)
    fleet.frontend.pump_until(5)
    return list(requests.values())


def recover(fleet: Fleet) -> list[Report]:
    """What a coordinator and its supervisors do: end the epoch everywhere, replace the dead, begin the next. The reports."""
    fleet.evidence()
    before = {engine.rank: engine.pid for engine in fleet.alive()}
    seconds = fleet.end()
    assert set(seconds) == set(before), fleet.logs()
    assert max(seconds.values(), default=0.0) < LEAVE_SECONDS
    reports = [report for engine in fleet.engines for report in engine.reports]
    for engine in fleet.engines:
        engine.reports.clear()
    dead = fleet.replace_dead()
    assert {engine.rank: engine.pid for engine in fleet.engines if engine.rank not in dead} == before
    fleet.begin()
    return reports


def finish(fleet: Fleet, requests: list[Request], calm: list[list[int]]) -> None:
    """Replay what has not ended: every request ends once, with the tokens of the calm run."""
    fleet.frontend.replay()
    fleet.frontend.finish()
    assert [(request.finish, request.error) for request in requests] == [("length", None)] * len(requests)
    assert [request.tokens for request in requests] == calm
    assert set(fleet.end()) == set(range(WORLD))


@pytest.mark.parametrize("killed", [[1], [0], [0, 2], [0, 1, 2]], ids=["worker", "head", "head-and-worker", "all"])
def test_survivors_of_a_kill_keep_their_process_and_every_request_its_tokens(
    fleet: Fleet, calm: list[list[int]], killed: list[int]
) -> None:
    requests = start_requests(fleet)
    for rank in killed:
        fleet.engines[rank].kill()
    reports = recover(fleet)
    assert {report.error for report in reports} <= {"EpPeerGone"}
    finish(fleet, requests, calm)
    fleet.stand_by(killed)


@pytest.mark.parametrize(
    ("kind", "rank", "error"),
    [
        ("corrupt", 0, "EpFrameCorrupt: "),
        ("corrupt", 1, "EpFrameCorrupt: "),
        ("close", 2, "EpPeerGone: "),
        ("prepare", 1, "EpRankFailed: "),
        ("execute", 0, "EpRankFailed: "),
        ("execute", 2, "EpRankFailed: "),
    ],
)
def test_a_fault_of_one_rank_ends_the_epoch_and_no_process(
    fleet: Fleet, calm: list[list[int]], kind: str, rank: int, error: str
) -> None:
    pids = [engine.pid for engine in fleet.engines]
    requests = start_requests(fleet)
    arm(fleet, kind, rank)
    reports = recover(fleet)
    said = [f"{report.error}: {report.message}" for report in reports]
    assert any(error in text for text in said), said
    finish(fleet, requests, calm)
    assert [engine.pid for engine in fleet.engines] == pids


def test_a_report_names_rank_step_command_and_phase(fleet: Fleet, calm: list[list[int]]) -> None:
    requests = start_requests(fleet)
    arm(fleet, "execute", 1)
    messages = [report.message for report in recover(fleet) if report.error == "EpRankFailed"]
    finish(fleet, requests, calm)
    (text,) = messages
    for part in ("rank 1: executing: Armed: armed in execute", "[rank 0: step ", ", DECODE executing, ", " collectives]"):
        assert part in text, text


@pytest.mark.parametrize("kind", ["prepare", "execute"])
def test_a_fault_of_all_ranks_alike_ends_nothing(fleet: Fleet, calm: list[list[int]], folder: Path, kind: str) -> None:
    """It is met by the step that holds one prompt, whichever step that is, beside the others' decoding."""
    marked = Request(prompt(11, seed=8), NEW_TOKENS)
    requests = start_requests(fleet)
    arm(fleet, kind, *range(WORLD), marker=marked.prompt)
    fleet.frontend.submit({"marked": marked})
    fleet.frontend.finish()
    judge_greedy(folder, marked.prompt, marked.tokens, Judged())
    assert not any((fleet.runtime_dir / f"{kind}-{rank}").exists() for rank in range(WORLD))
    assert all(not engine.reports for engine in fleet.engines)
    finish(fleet, requests, calm)


def test_a_device_that_fails_takes_its_process_and_no_other(fleet: Fleet, calm: list[list[int]]) -> None:
    requests = start_requests(fleet)
    arm(fleet, "device", 1)
    assert fleet.engines[1].exit_status() == 1
    assert fleet.engines[1].report().error == "DeviceLostError"
    recover(fleet)
    finish(fleet, requests, calm)
    fleet.stand_by([1])


def test_ranks_leave_while_another_is_stopped(fleet: Fleet, calm: list[list[int]]) -> None:
    """Nobody but a supervisor notices a stopped process: the others wait for it in a collective until they are told."""
    requests = start_requests(fleet)
    fleet.engines[2].process.send_signal(signal.SIGSTOP)
    while fleet.engines[0].page.read().idle_s < 0.2:
        os.sched_yield()
    living = fleet.engines[:2]
    for engine in living:
        assert engine.leaves(fleet.epoch) < LEAVE_SECONDS
    fleet.engines[2].kill()
    assert fleet.replace_dead() == [2]
    fleet.begin()
    finish(fleet, requests, calm)
    fleet.stand_by([2])
