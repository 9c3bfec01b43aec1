"""How sequences end, leave and come back: stops, aborts, preemption, discarded and failed plans, replay."""

from __future__ import annotations

import pytest
from driver import Driver, limits, request
from fake_device import run_alone

from ep_runtime.scheduler.core import SchedulerError, SpanResult, StepResult
from ep_runtime.scheduler.scheduler import Scheduler
from ep_runtime.scheduler.slots import SlotState

PROMPT = [1, 2, 1]
ALONE, _ = run_alone(PROMPT, 12, frozenset())


def test_a_stop_is_seen_one_step_late_and_the_wasted_row_is_discarded():
    driver = Driver(limits(), depth=1)
    driver.submit(request("a", PROMPT, 12, stop_token_ids=[ALONE[2]]))
    for _ in range(4):
        driver.step()
    # The third token is read after the fourth step, which computes a row too many, is launched.
    assert driver.answers["a"].tokens == ALONE[:3]
    assert driver.answers["a"].final.stop_token == ALONE[2]
    slots = driver.owner().slots
    assert slots.state(0) is SlotState.DRAINING
    assert driver.scheduler.stats().free_blocks < 32
    driver.submit(request("b", [9], 1))
    driver.step()
    assert driver.plans[-1].frees == (0,)
    assert [alloc.slot for alloc in driver.plans[-1].allocs] == [1], "slot 0 drains until the wasted row's result is read"
    assert slots.state(0) is SlotState.EMPTY
    driver.run()
    driver.check_answers()


@pytest.mark.parametrize(
    ("changes", "count", "finish"),
    [
        ({}, 4, "stop"),
        ({"ignore_eos": True}, 12, "length"),
        ({"ignore_eos": True, "stop_token_ids": [ALONE[1]]}, 2, "stop"),
        ({"min_tokens": 4}, 4, "stop"),
        ({"min_tokens": 5}, 12, "length"),
        ({"min_tokens": 3, "stop_token_ids": [ALONE[1], ALONE[4]]}, 4, "stop"),
        ({"max_tokens": 4}, 4, "stop"),
        ({"max_tokens": 3}, 3, "length"),
    ],
)
def test_stop_rules(changes, count, finish):
    assert all(ALONE.count(token) == 1 for token in ALONE[:5])
    driver = Driver(limits(eos_token_ids=(ALONE[3],)))
    driver.submit(request("a", PROMPT, **{"max_tokens": 12, **changes}))
    driver.run()
    answer = driver.answers["a"]
    assert (answer.tokens, answer.final.finish) == (ALONE[:count], finish)
    assert answer.final.stop_token == (ALONE[count - 1] if finish == "stop" else None)


def test_replayed_tokens_are_prefilled_and_not_emitted_again():
    driver = Driver(limits())
    driver.submit(request("a", PROMPT, 12, generated=ALONE[:5]))
    driver.run()
    assert driver.plans[0].tokens == (*PROMPT, *ALONE[:5])
    assert driver.answers["a"].tokens == ALONE[5:]


@pytest.mark.parametrize(("generated", "finish"), [(ALONE, "length"), (ALONE[:4], "stop")])
def test_a_replay_that_was_complete_ends_at_once(generated, finish):
    driver = Driver(limits())
    update = driver.submit(request("a", PROMPT, 12, generated=generated, stop_token_ids=[ALONE[3]]))
    assert (update.finish, update.tokens) == (finish, [])
    assert driver.scheduler.idle


def test_aborts_at_every_stage():
    driver = Driver(limits(max_slots=2), depth=1)
    for name in ("running", "planned", "waiting"):
        driver.submit(request(name, [1, 2], 9))
    driver.step()
    driver.scheduler.abort(["waiting", "running", "unknown", "waiting"])
    updates = driver.scheduler.drain_updates()
    assert [(update.request_id, update.finish) for update in updates] == [("waiting", "abort"), ("running", "abort")]
    driver.take(updates)
    assert driver.scheduler.drain_updates() == []
    plan = driver.plan()
    assert plan.owners == ("planned",)
    driver.abort("planned")
    driver.launch(plan)
    driver.run()
    assert driver.answers["planned"].tokens == []
    driver.check_answers()


def test_updates_of_aborts_come_with_the_next_results_too():
    driver = Driver(limits(), depth=0)
    driver.submit(request("a", [1], 2))
    driver.submit(request("b", [1], 2))
    plan = driver.plan()
    driver.scheduler.launched(plan)
    driver.scheduler.abort(["b"])
    updates = driver.scheduler.complete(driver.device.execute(plan))
    assert [(update.request_id, update.finish) for update in updates] == [("b", "abort"), ("a", None)]


def crowd(depth: int) -> Driver:
    """Three sequences that outgrow 12 blocks of 2; the last is preempted."""
    driver = Driver(limits(max_slots=3, block_size=2, num_blocks=12, max_batch_tokens=30), depth=depth)
    for number in range(3):
        driver.submit(request(str(number), [number] * 3, 14))
    return driver


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_latest_arrival_is_preempted_and_recomputed(depth):
    driver = crowd(depth)
    driver.submit(request("later", [8], 1))
    driver.run()
    driver.check_answers()
    assert driver.scheduler.stats().preemptions > 0
    allocs = [alloc.request_id for plan in driver.plans for alloc in plan.allocs]
    assert allocs.count("0") == 1
    assert allocs.count("2") > 1
    assert allocs.index("later") > max(index for index, name in enumerate(allocs) if name == "2"), "it waits at its own place"


def test_a_preempted_sequence_keeps_the_token_in_flight_and_waits_until_it_is_read():
    driver = crowd(1)
    scheduler = driver.scheduler
    while scheduler.stats().preemptions == 0:
        driver.launch(driver.plan())
        if len(driver.queue) > 1 and scheduler.stats().preemptions == 0:
            driver.read()
    victim = scheduler._live["2"]
    before = len(victim.tokens)
    assert victim.slot in driver.plans[-1].frees
    assert "2" not in driver.plans[-1].owners
    assert scheduler.stats().waiting == 0
    while victim.in_flight:
        driver.read()
    assert len(victim.tokens) == before + 1
    assert scheduler.stats().waiting == 1
    driver.run()
    driver.check_answers()


def test_cached_blocks_are_evicted_before_anyone_is_preempted():
    driver = Driver(limits(block_size=2, num_blocks=12, prefix_cache=True), depth=1)
    driver.submit(request("old", [5] * 12, 8))
    driver.run()
    assert driver.scheduler.stats().free_blocks == 12
    assert len(driver.owner().tree) >= 8
    driver.submit(request("a", [1] * 4, 20))
    driver.run()
    assert driver.scheduler.stats().preemptions == 0
    driver.check_answers()


def test_a_discarded_plan_returns_everything_and_is_made_again():
    driver = Driver(limits(num_blocks=24, prefix_cache=True), depth=1)
    driver.submit(request("a", [1] * 8, 9))
    driver.step()
    for number in range(12):
        driver.submit(request(f"n{number}", [number] * 7, 3))
        free = driver.scheduler.stats()
        plan = driver.plan()
        driver.discard(plan)
        assert driver.scheduler.stats() == free
        again = driver.plan()
        assert again == plan
        driver.launch(again)
        if len(driver.queue) > 1:
            driver.read()
    driver.run()
    driver.check_answers()


def test_slots_of_a_half_sent_plan_are_freed_with_the_next():
    driver = Driver(limits(), depth=1)
    driver.submit(request("a", [1], 3))
    plan = driver.plan()
    driver.discard(plan, half_sent=True)
    plan = driver.plan()
    assert plan.frees == (0,)
    assert plan.allocs[0].slot == 0
    driver.launch(plan)
    driver.run()


def test_an_alloc_that_was_voted_down_ends_its_request_alone():
    driver = Driver(limits(), depth=1)
    driver.submit(request("a", [1], 3))
    driver.submit(request("b", [2], 3))
    driver.discard(driver.plan())
    driver.scheduler.reject(["a"], "rank 1 has no memory for it")
    driver.take(driver.scheduler.drain_updates())
    driver.run()
    assert (driver.answers["a"].final.finish, driver.answers["a"].final.status) == ("error", 500)
    assert driver.answers["b"].final.finish == "length"


def test_a_failed_batch_fails_the_named_requests_and_recomputes_the_others():
    driver = Driver(limits(), depth=0)
    for name in ("a", "b", "c"):
        driver.submit(request(name, PROMPT, 5))
    driver.step()
    plan = driver.plan()
    driver.scheduler.launched(plan)
    driver.take(driver.scheduler.fail(plan, "b is wrong", ["b"]))
    assert driver.answers["b"].final.error == "b is wrong"
    driver.step()
    assert sorted(driver.plans[-1].frees) == [0, 1, 2]
    assert [alloc.request_id for alloc in driver.plans[-1].allocs] == ["a", "c"]
    driver.run()
    driver.check_answers()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_that_fails_its_batches_is_run_alone_and_only_it_ends_with_the_error(depth):
    driver = Driver(limits(), depth=depth, evil=frozenset({"evil"}))
    for name in ("a", "evil", "b"):
        driver.submit(request(name, PROMPT, 12))
    driver.run()
    assert driver.answers["evil"].final.status == 500
    assert driver.answers["a"].tokens == driver.answers["b"].tokens == ALONE
    fatal = [plan for plan in driver.plans if "evil" in plan.owners]
    assert fatal[-1].owners == ("evil",)


def test_suspects_that_get_a_token_alone_share_batches_again():
    driver = Driver(limits(), depth=1)
    for name in ("a", "b"):
        driver.submit(request(name, PROMPT, 12))
    for _ in range(2):
        plan = driver.plan()
        assert plan.owners == ("a", "b")
        driver.scheduler.launched(plan)
        driver.take(driver.scheduler.fail(plan, "no memory for this batch"))
    driver.run()
    owners = [plan.owners for plan in driver.plans]
    assert owners.index(("a",)) < owners.index(("a", "b"))
    assert owners.index(("b",)) < owners.index(("a", "b"))
    driver.check_answers()


def test_a_prompt_that_is_still_computed_is_preempted_before_an_earlier_sequence():
    driver = Driver(limits(block_size=2, num_blocks=20, max_batch_tokens=4), depth=1)
    for name in ("a", "b"):
        driver.submit(request(name, [1], 14))
    driver.step()
    driver.submit(request("long", [3] * 24, 2))
    while driver.scheduler.stats().preemptions == 0:
        driver.step()
    assert driver.scheduler.stats().running == 2
    driver.run()
    allocs = [alloc.request_id for plan in driver.plans for alloc in plan.allocs]
    assert allocs == ["a", "b", "long", "long"]
    driver.check_answers()


def test_results_of_steps_after_a_failed_one_are_void_for_its_sequences():
    driver = Driver(limits(), depth=2)
    for name in ("a", "b"):
        driver.submit(request(name, PROMPT, 12))
    plans = []
    for _ in range(3):
        plan = driver.plan()
        driver.scheduler.launched(plan)
        plans.append((plan, driver.device.execute(plan)))
    driver.take(driver.scheduler.complete(plans[0][1]))
    driver.take(driver.scheduler.fail(plans[1][0], "failed"))
    lies = StepResult(plan=plans[2][0], spans=(SpanResult(token=49), SpanResult(token=49)))
    assert driver.scheduler.complete(lies) == []
    driver.run()
    driver.check_answers()


def test_a_broken_contract_is_refused():
    scheduler = Scheduler(limits())
    scheduler.submit(request("a", [1], 5))
    with pytest.raises(SchedulerError, match="alive"):
        scheduler.submit(request("a", [1], 5))
    first = scheduler.plan()
    with pytest.raises(SchedulerError, match="neither launched nor discarded"):
        scheduler.plan()
    scheduler.launched(first)
    with pytest.raises(SchedulerError, match="made last"):
        scheduler.discard(first)
    second = scheduler.plan()
    scheduler.launched(second)
    with pytest.raises(SchedulerError, match="launch order"):
        scheduler.complete(StepResult(plan=second, spans=(SpanResult(token=1),)))
    with pytest.raises(SchedulerError, match="no token"):
        scheduler.complete(StepResult(plan=first, spans=(SpanResult(),)))
