"""Loops of a request: what they come from, and that the depths of tokens stay with their tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.choice import Choice, ChoiceDelta, ChoiceParts
from ep_runtime.frontend.journal import Journal
from ep_runtime.frontend.loops import LoopsRefused, choose_loops
from ep_runtime.frontend.metrics import Metrics
from ep_runtime.frontend.text.stops import StopMatcher
from protocol.codec import decode, encode
from protocol.commands import MOST_LOOPS, Loops
from protocol.messages import SamplingParams, SequenceUpdate, Submit, ToEngine


def fields(max_loops: int | None = None, exit_thresholds: Any = None) -> SimpleNamespace:
    return SimpleNamespace(max_loops=max_loops, exit_thresholds=exit_thresholds)


ONE, EXITS = fields(1, ()), fields(3, (0.5, 0.75))


@pytest.mark.parametrize(
    ("asked", "defaults", "loops"),
    [
        (fields(), ONE, None),
        (fields(1), EXITS, None),
        (fields(1, []), EXITS, None),
        (fields(), EXITS, Loops(3, [0.5, 0.75])),
        (fields(2), EXITS, Loops(2, [0.5])),
        (fields(4), EXITS, Loops(4)),
        (fields(None, ()), EXITS, Loops(3)),
        (fields(None, (0.0, 1.0)), EXITS, Loops(3, [0.0, 1.0])),
        (fields(4, [0.1] * 3), ONE, Loops(4, [0.1] * 3)),
        (fields(3), fields(4, ()), Loops(3)),
    ],
)
def test_what_a_request_leaves_open_is_the_defaults(asked: Any, defaults: Any, loops: Loops | None) -> None:
    assert choose_loops(asked, defaults, 4) == loops


@pytest.mark.parametrize(
    ("asked", "defaults", "param", "words"),
    [
        (fields(0), ONE, "max_loops", "1 to 4 loops"),
        (fields(5), ONE, "max_loops", "1 to 4 loops"),
        (fields(), fields(5, ()), "max_loops", "1 to 4 loops"),
        (fields(3, [0.5]), ONE, "exit_thresholds", "has 1 values; with max_loops 3 give one for each loop but the last, 2 in all"),
        (fields(None, [0.5]), EXITS, "exit_thresholds", r"with max_loops 3 \(the default\) give"),
        (fields(2, [1.5]), ONE, "exit_thresholds", r"exit_thresholds\[0\] is 1.5; a threshold is from 0 to 1"),
        (fields(3, [0.5, math.nan]), ONE, "exit_thresholds", r"exit_thresholds\[1\] is nan"),
    ],
)
def test_what_the_model_cannot_do_is_refused(asked: Any, defaults: Any, param: str, words: str) -> None:
    with pytest.raises(LoopsRefused, match=words) as refused:
        choose_loops(asked, defaults, 4)
    assert refused.value.param == param


def test_a_model_that_is_not_looped_is_asked_for_nothing() -> None:
    assert choose_loops(fields(), ONE, 1) is None
    for asked, param in ((fields(1), "max_loops"), (fields(None, ()), "exit_thresholds"), (fields(2, [0.5]), "max_loops")):
        with pytest.raises(LoopsRefused, match=f"{param} is for looped models") as refused:
            choose_loops(asked, ONE, 1)
        assert refused.value.param == param


class Ignored:
    def deliver(self, update: SequenceUpdate) -> None:
        """Nobody looks."""

    def fail(self, error: ApiError) -> None:
        """Nobody looks."""


def submit(name: str, loops: Loops | None) -> Submit:
    return Submit(name, "group", [1, 2], SamplingParams(seed=1, max_tokens=9, loops=loops))


def test_the_journal_keeps_the_depth_of_each_token() -> None:
    journal = Journal()
    looped, plain = journal.add(submit("a", Loops(4, [0.5] * 3)), Ignored()), journal.add(submit("b", None), Ignored())
    assert looped.replay().depths == []
    for update in (
        SequenceUpdate("a", [7], depths=[0]),
        SequenceUpdate("b", [7, 8]),
        SequenceUpdate("a", []),
        SequenceUpdate("a", [8, 9], depths=[4, 1]),
    ):
        journal.record(update)
        journal.check_integrity()
    again = decode(ToEngine, encode(looped.replay()))
    assert isinstance(again, Submit)
    assert (again.generated, again.depths, again.sampling.loops) == ([7, 8, 9], [0, 4, 1], Loops(4, [0.5] * 3))
    assert plain.replay().depths == []
    # What was sent is a copy: the next update does not change it.
    sent = looped.replay()
    journal.record(SequenceUpdate("a", [5], depths=[2]))
    assert (sent.generated, sent.depths) == ([7, 8, 9], [0, 4, 1])
    journal.record(SequenceUpdate("a", [6], depths=[3], finish="length"))
    assert journal.get("a") is None


@pytest.mark.parametrize(("loops", "depths"), [(Loops(2), []), (Loops(2), [0, 1]), (None, [0]), (Loops(1), [0])])
def test_depths_that_do_not_pair_are_found(loops: Loops | None, depths: list[int]) -> None:
    journal = Journal()
    journal.add(submit("a", loops), Ignored())
    journal.record(SequenceUpdate("a", [7], depths=depths))
    with pytest.raises(AssertionError, match="depths"):
        journal.check_integrity()


class Letters:
    """A detokenizer whose tokens are letters."""

    def push(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def finish(self) -> str:
        return ""


def test_depths_end_with_the_tokens_at_a_stop_string() -> None:
    choice = Choice(0, ChoiceParts(detokenizer=Letters(), stops=StopMatcher(["cd"])))  # type: ignore[arg-type]
    first = choice.push(SequenceUpdate("a", [ord("a")], depths=[0]))
    delta = choice.push(SequenceUpdate("a", [ord(letter) for letter in "bcdef"], depths=[3, 1, 2, 4, 4]))
    assert (first.depths, delta.depths) == ([0], [3, 1, 2])
    assert delta.finish == "stop"
    assert (choice.loops, choice.decoded, choice.generated) == (6, 3, 4)
    assert delta.cost() > ChoiceDelta(index=0, content=delta.content, token_ids=delta.token_ids).cost()


def test_there_is_no_counter_of_loops_without_loops() -> None:
    metrics = Metrics()
    metrics.observe_loops(3, [])
    assert metrics.registry.get_sample_value("ep_generated_tokens_by_loops_total", {"loops": "1"}) is None
    metrics.serve_loops(3)
    metrics.serve_loops(3)
    metrics.observe_loops(2, [])
    metrics.observe_loops(0, [])
    metrics.observe_loops(4, [0, 3, 3, 1])
    found = {
        label: metrics.registry.get_sample_value("ep_generated_tokens_by_loops_total", {"loops": label})
        for label in ("prompt", "1", "2", "3")
    }
    assert found == {"prompt": 1, "1": 3, "2": 0, "3": 2}


def test_the_most_loops_of_a_message_fit_into_it() -> None:
    asked = choose_loops(fields(MOST_LOOPS, [0.5] * (MOST_LOOPS - 1)), ONE, MOST_LOOPS)
    message = submit("a", asked)
    assert decode(ToEngine, encode(message)) == message
