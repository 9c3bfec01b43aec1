"""Grammar rows: planned when the mask for their next token is here, and in nobody's way until then."""

from __future__ import annotations

import pytest
from driver import Driver, limits, request
from fake_device import run_alone

from ep_runtime.scheduler.core import SeqState

PROMPT = [1, 2, 1]
ALONE, _ = run_alone(PROMPT, 12, frozenset())


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_row_without_its_mask_is_left_out_and_the_others_go_on(depth):
    driver = Driver(limits(), depth=depth)
    driver.submit(request("masked", PROMPT, 4, grammar=True))
    for name in ("a", "b"):
        driver.submit(request(name, PROMPT, 12))
    while driver.answers["b"].final is None:
        assert driver.step()
    assert driver.answers["masked"].tokens == ALONE[:1]
    assert [plan.owners for plan in driver.plans].count(("a", "b")) == 11
    driver.run()
    driver.check_answers()


def test_a_mask_lets_one_row_through():
    driver = Driver(limits(), depth=2)
    driver.submit(request("masked", PROMPT, 4, grammar=True))
    driver.step()
    assert driver.plan() is None
    while not driver.owed:
        driver.read()
    assert driver.plan() is None
    driver.give_masks()
    plan = driver.plan()
    assert [(span.start, span.fed) for span in plan.spans] == [(3, True)]
    driver.launch(plan)
    assert driver.plan() is None
    driver.run()
    driver.check_answers()


@pytest.mark.parametrize("index", [0, 2, 7, 2**63])
def test_a_mask_that_is_not_the_next_one_changes_nothing(index):
    driver = Driver(limits(), depth=0)
    driver.submit(request("masked", PROMPT, 4, grammar=True))
    driver.step()
    assert not driver.scheduler.allow("masked", index)
    assert not driver.scheduler.allow("nobody", 1)
    assert driver.plan() is None
    driver.run()
    driver.check_answers()


def test_a_preempted_grammar_sequence_is_parked_and_comes_back_to_its_own_place():
    driver = Driver(limits(max_slots=3, block_size=2, num_blocks=12, max_batch_tokens=30), depth=1)
    for number in range(3):
        driver.submit(request(str(number), [number] * 3, 14, grammar=number == 2))
    while driver.scheduler.stats().preemptions == 0:
        driver.step()
        if len(driver.answers["2"].tokens) < 3:
            driver.give_masks()
    victim = driver.scheduler._live["2"]
    while victim.in_flight:
        driver.read()
    assert (victim.state, len(driver.scheduler._life.queue), driver.scheduler.stats().waiting) == (SeqState.WAITING, 0, 1)
    driver.submit(request("later", [8], 2))
    while driver.answers["later"].final is None:
        assert driver.step(), "what is parked blocks the queue"
    driver.give_masks()
    assert len(driver.scheduler._life.queue) == 1
    driver.run()
    driver.check_answers()


def test_a_parked_sequence_can_be_aborted():
    driver = Driver(limits(max_slots=2, block_size=2, num_blocks=8, max_batch_tokens=30), depth=0)
    driver.submit(request("a", [1] * 3, 13))
    driver.submit(request("masked", [2] * 3, 13, grammar=True))
    while driver.scheduler.stats().preemptions == 0:
        driver.step()
    assert driver.scheduler.stats().waiting == 1
    driver.abort("masked")
    driver.run()
    assert driver.answers["masked"].final.finish == "abort"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_batch_samples_the_same_index_with_the_mask_that_is_there(depth):
    driver = Driver(limits(), depth=depth)
    driver.submit(request("masked", PROMPT, 6, grammar=True))
    driver.submit(request("a", PROMPT, 6))
    while len(driver.answers["masked"].tokens) < 2:
        driver.step()
        driver.give_masks()
    while driver.queue:
        driver.read()
    driver.give_masks()
    plan = driver.plan()
    assert sorted(plan.owners) == ["a", "masked"]
    driver.scheduler.launched(plan)
    driver.take(driver.scheduler.fail(plan, "failed"))
    assert driver.owed == {}
    driver.run()
    driver.check_answers()
