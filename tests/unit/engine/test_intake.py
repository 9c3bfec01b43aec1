"""Requests that come all at once: the first step goes out before the last is taken in, and each of them gets its one answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ep_runtime import LLM, SamplingParams
from ep_runtime.engine.intake import TAKEN_AT_ONCE, Intake
from ep_runtime.engine.port import FrontendLost, Received, Undecodable
from protocol import messages
from protocol.commands import Body, Forward
from protocol.messages import Abort, Mask, Submit, Takeover
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.engine import Driver, head_of
from tests.support.greedy import Judged, judge_greedy
from tests.support.rank_context import RankContext

CONTEXT = RankContext(rank=0, world=1, epoch=0, store_port=0, store_fd=None, runtime_dir=Path(), kwargs={})
SIZES: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_queue": 300}
MANY = 100


def request(name: str, length: int = 4, generated: int = 0, priority: int = 0) -> Submit:
    sampling = messages.SamplingParams(seed=1, max_tokens=4)
    return Submit(request_id=name, group=name, prompt=[5] * length, sampling=sampling, generated=[6] * generated, priority=priority)


def names(submits: list[Submit]) -> list[str]:
    return [submit.request_id for submit in submits]


# What waits


def test_taken_in_order_and_at_most_so_many_at_once() -> None:
    intake = Intake()
    for number in range(TAKEN_AT_ONCE + 3):
        intake.add(request(str(number)))
    assert names(intake.take()) == [str(number) for number in range(TAKEN_AT_ONCE)]
    assert names(intake.take()) == [str(number) for number in range(TAKEN_AT_ONCE, TAKEN_AT_ONCE + 3)]
    assert intake.take() == []
    assert not intake


def test_whoever_runs_first_is_taken_in_first() -> None:
    intake = Intake()
    for number, priority in enumerate([0, 1, -1, 0, -1]):
        intake.add(request(str(number), priority=priority))
    assert names(intake.take(rows=1)) == ["2"]
    assert names(intake.due_before(FrontendLost())) == ["4", "0", "3", "1"]


@pytest.mark.parametrize(("rows", "taken"), [(1, 1), (10, 1), (11, 2), (12, 2), (17, 2), (18, 3), (1000, 4)])
def test_no_more_than_fill_a_step_and_never_none(rows: int, taken: int) -> None:
    intake = Intake()
    for number, (length, generated) in enumerate([(10, 0), (4, 3), (100, 0), (1, 0)]):
        intake.add(request(str(number), length, generated))
    assert len(intake.take(rows)) == taken
    assert len(intake) == 4 - taken


@pytest.mark.parametrize(
    ("message", "due"),
    [
        (request("1"), []),
        (Mask(request_id="1", index=1, mask=b""), []),
        (Abort(["7", "2", "1"]), ["1", "2"]),
        (Abort(["7"]), []),
        (Undecodable("1", "Abort", "no"), ["1"]),
        (Undecodable("7", "Abort", "no"), []),
        (FrontendLost(), ["0", "1", "2"]),
        (Takeover(prefix="b"), ["0", "1", "2"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_be_about_a_request_that_waits_comes_behind_it(message: Received, due: list[str]) -> None:
    intake = Intake()
    assert intake.due_before(message) == []
    for name in ("0", "1", "2"):
        intake.add(request(name))
    assert names(intake.due_before(message)) == due
    assert names(intake.take()) == [name for name in ("0", "1", "2") if name not in due]


def test_what_is_picked_out_is_found_nowhere_else_and_leaves_nothing_behind() -> None:
    """Requests come, are taken in and given up in any order: those that are left are a sorted list's."""
    rng = random.Random(3)
    intake, left = Intake(), []
    for number in range(3000):
        left.append((priority := rng.randrange(3), number, str(number % 1000)))
        intake.add(request(str(number % 1000), priority=priority))
        if rng.random() < 0.4:
            given_up = {str(rng.randrange(1000)) for _ in range(4)}
            picked = sorted(entry for entry in left if entry[2] in given_up)
            assert names(intake.due_before(Abort(sorted(given_up)))) == [name for *_, name in picked]
            left = [entry for entry in left if entry[2] not in given_up]
        if rng.random() < 0.1:
            left.sort()
            assert names(intake.take(rows=8)) == [name for *_, name in left[:2]]
            del left[:2]
        assert len(intake) == len(left)
        assert len(intake._heap) <= 2 * len(left) + TAKEN_AT_ONCE + 1
    assert names(intake.due_before(FrontendLost())) == [name for *_, name in sorted(left)]
    assert (len(intake), intake.take(), intake._numbers) == (0, [], {})


# The head


class Watched:
    """A head, and before each of its forwards: rows, and how many requests it had taken in."""

    def __init__(self, driver: Driver, folder: Path) -> None:
        self.driver, self.folder = driver, folder
        self.forwards: list[tuple[int, int]] = []
        self._run = driver.broadcaster.run
        driver.broadcaster.run = self._note  # type: ignore[method-assign]

    def _note(self, command: Body, seq_id: int, **rest: Any) -> None:
        if isinstance(command, Forward):
            self.forwards.append((sum(span.length for span in command.spans), len(self.driver.head.requests)))
        self._run(command, seq_id, **rest)

    def burst(self, count: int, max_tokens: int = 3) -> dict[str, list[int]]:
        """So many requests at once, of 16 tokens each, and their prompts by name."""
        prompts = {str(n): [(7 * n + place) % (VOCAB - 3) + 3 for place in range(16)] for n in range(count)}
        for name, prompt in prompts.items():
            self.driver.submit(name, prompt, max_tokens=max_tokens)
        return prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mixtral", "plain", tmp_path_factory.mktemp("intake") / "model")


@pytest.fixture
def head(folder: Path) -> Iterator[Watched]:
    with head_of(CONTEXT, str(folder), **SIZES) as driver:
        assert driver is not None
        yield Watched(driver, folder)


def test_the_first_step_goes_out_before_the_others_are_taken_in(head: Watched) -> None:
    """Four prompts of 16 tokens fill a step of 64: they are computed while 96 others wait, and all are answered, in their order."""
    started: list[str] = []
    taken: list[int] = []
    prompts = head.burst(MANY)
    head.driver.turn()
    assert head.forwards == [(64, 4)]
    head.driver.on_update = lambda update: (started.append(update.request_id), taken.append(len(head.driver.head.requests)))
    head.driver.turn()
    assert taken[:4] == [4] * 4  # their tokens are told before others are taken in
    assert head.forwards[1][1] == 4 + TAKEN_AT_ONCE
    assert not head.driver.head.idle
    answers = head.driver.finish()
    assert list(dict.fromkeys(started)) == list(prompts)
    judged = Judged()
    for name, prompt in prompts.items():
        assert (answers[name].finish, answers[name].terminal_events) == ("length", 1)
        judge_greedy(head.folder, prompt, answers[name].tokens, judged)
    assert (judged.tokens, judged.ties) == (3 * MANY, 0)


def test_an_urgent_request_waits_for_no_burst_before_it(head: Watched) -> None:
    head.burst(MANY)
    head.driver.send(request("urgent", length=16, priority=-1))
    head.driver.turn()
    assert head.forwards == [(64, 4)]
    assert "urgent" in head.driver.head.requests
    assert head.driver.head.requests.ids()[0] == "urgent"
    head.driver.finish()


def test_what_waits_counts_as_waiting(head: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[messages.EngineStats] = []
    publish = head.driver.port.publish
    monkeypatch.setattr(head.driver.port, "publish", lambda told: (reports.append(told.stats), publish(told)))
    head.burst(MANY)
    head.driver.turn()
    head.driver.turn()
    assert {(report.running + report.waiting) for report in reports if report.running} == {MANY}
    head.driver.finish()


def test_masks_are_gathered_for_nobody_who_waits(head: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """All live requests have grammars: once another one has come, its step is not put off for their masks."""
    looks: list[float] = []
    monkeypatch.setattr(head.driver.head.requests, "more_masks_coming", lambda after: (looks.append(after), len(looks) < 100)[1])
    head.driver.submit("0", [5, 6, 7], max_tokens=3)
    head.driver.turn()
    assert head.forwards == [(3, 1)]
    assert not looks
    head.driver.finish()


def test_requests_beyond_the_queue_are_told_so_within_a_few_turns(head: Watched) -> None:
    room = SIZES["max_num_seqs"] + SIZES["max_queue"]
    head.burst(room + 2, max_tokens=15)
    for _ in range(1 + -(-room // TAKEN_AT_ONCE)):
        head.driver.turn()
    ended = {name: answer.status for name, answer in head.driver.answers.items() if answer.finish is not None}
    assert ended == {str(room): 429, str(room + 1): 429}


def test_a_request_that_waits_is_aborted_like_any_other(head: Watched) -> None:
    head.burst(MANY)
    head.driver.send(Abort(["50", "99", "0"]))
    head.driver.turn()
    ended = {name: answer.finish for name, answer in head.driver.answers.items() if answer.finish is not None}
    assert ended == {"50": "abort", "99": "abort", "0": "abort"}
    assert len(head.driver.head.requests) == 4  # a step of them: the others wait on
    answers = head.driver.finish()
    assert {answer.terminal_events for answer in answers.values()} == {1}
    assert sum(answer.finish == "length" for answer in answers.values()) == MANY - 3


def test_a_request_that_is_refused_as_it_is_taken_in_gets_no_second_answer(head: Watched) -> None:
    """A broken message is about it, and would be answered in its stead if nobody had answered."""
    head.burst(MANY)
    head.driver.submit("bad", [VOCAB], max_tokens=3)
    head.driver.port.send(Undecodable("bad", "Abort", "broken"))  # type: ignore[arg-type]
    head.driver.turn()
    assert (head.driver.answers["bad"].status, head.driver.answers["bad"].terminal_events) == (400, 1)
    head.driver.finish()


def test_a_lost_frontend_takes_along_what_waits(head: Watched) -> None:
    head.burst(MANY)
    head.driver.turn()
    assert len(head.driver.head.requests) < MANY
    head.driver.port._inbox.append(FrontendLost())  # type: ignore[arg-type]
    answers = head.driver.finish()
    assert {(answer.finish, answer.terminal_events) for answer in answers.values()} == {("abort", 1)}
    assert not head.driver.head.requests


def test_a_burst_that_is_refused_does_not_rest_in_between(head: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn without a step does not wait for messages while requests wait for it."""
    waits: list[float] = []
    receive = head.driver.port.receive
    monkeypatch.setattr(head.driver.port, "receive", lambda wait_s: (waits.append(wait_s), receive(wait_s))[1])
    for number in range(2 * TAKEN_AT_ONCE + 1):
        head.driver.submit(str(number), [VOCAB], max_tokens=3)
    for _ in range(4):
        head.driver.head.turn(idle_wait_s=0.125)
    assert waits == [0.0, 0.0, 0.0, 0.125]
    assert {(answer.status, answer.terminal_events) for answer in head.driver.answers.values()} == {(400, 1)}


def test_a_head_that_leaves_answers_what_waits(head: Watched) -> None:
    head.burst(MANY)
    head.driver.turn()
    head.driver.head.shutdown()
    assert {answer.terminal_events for answer in head.driver.answers.values()} == {1}
    statuses = [answer.status for answer in head.driver.answers.values()]
    assert statuses.count(503) >= MANY - 4 - TAKEN_AT_ONCE
    assert head.driver.head.idle


# Offline


def test_offline_hands_over_while_steps_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first turn of a call with 200 prompts not all are handed over; outputs are in order, a bad prompt's among them."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [[(7 * n + place) % (VOCAB - 3) + 3 for place in range(5 + n % 3)] for n in range(200)]
    prompts[150] = [VOCAB]
    with LLM(str(folder), **SIZES, device="cpu", threads=1) as llm:
        handed: list[int] = []
        turn = llm.head.turn
        monkeypatch.setattr(llm.head, "turn", lambda idle_wait_s: (handed.append(len(llm._collectors)), turn(idle_wait_s)))
        outputs = llm.generate(prompts, params)
    assert handed[0] == TAKEN_AT_ONCE
    assert [output.prompt_token_ids for output in outputs] == prompts
    judged = Judged()
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        (completion,) = output.outputs
        assert completion.finish_reason == ("error" if number == 150 else "length")
        if number != 150:
            judge_greedy(folder, prompt, completion.token_ids, judged)
    assert judged.tokens == 3 * 199


@pytest.mark.parametrize("make", [tuple, lambda ids: [float(token) for token in ids], lambda ids: [True, *ids[1:]]])
def test_prompts_of_what_is_like_integers(folder: Path, make: Any) -> None:
    with LLM(str(folder), **SIZES, device="cpu", threads=1) as llm:
        (output,) = llm.generate([make([1, 6, 7])], SamplingParams(temperature=0.0, max_tokens=1))
    assert output.prompt_token_ids == [1, 6, 7]
    assert {type(token) for token in output.prompt_token_ids} == {int}
