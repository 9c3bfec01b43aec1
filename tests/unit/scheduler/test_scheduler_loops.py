"""Sequences of several loops: whole prompts, replay row by row with the loops of each, and nothing of theirs in the prefix tree."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import msgspec
import pytest
from driver import Driver, limits, random_prompt, request
from fake_device import run_looped
from test_scheduler_random import random_limits, random_loops, random_messages

from ep_runtime.scheduler.core import SchedulerError, SpanResult, StepResult
from ep_runtime.scheduler.scheduler import Scheduler
from protocol.commands import Loops, Wanted
from protocol.messages import Submit

EXITS = Loops(3, [0.5, 0.5])


def bound(**changes):
    return limits(**{"max_loops": 4, **changes})


def shape(span):
    return (span.start, span.length, span.fed, span.sampled, span.wanted, span.depth)


def replayed(name, prompt, depths, max_tokens=12, loops=EXITS, **changes):
    """A request of an earlier epoch whose rows have run these loops."""
    generated = run_looped(prompt, depths)
    return request(name, prompt, max_tokens, loops=loops, generated=generated, depths=depths, **changes)


def test_a_prompt_is_one_piece_and_its_decode_rows_are_fed():
    driver = Driver(bound(), depth=0)
    driver.submit(request("a", [1, 2, 3, 4, 5], 4, loops=EXITS))
    driver.run()
    assert [shape(plan.spans[0]) for plan in driver.plans if plan.spans] == [
        (0, 5, False, True, Wanted.LAST, 0),
        (5, 1, True, True, Wanted.LAST, 0),
        (6, 1, True, True, Wanted.LAST, 0),
        (7, 1, True, True, Wanted.LAST, 0),
    ]
    assert driver.plans[0].allocs[0].loops == EXITS
    driver.check_answers()


def test_a_prompt_waits_until_a_step_has_room_for_all_of_it():
    driver = Driver(bound(max_batch_tokens=8), depth=0)
    driver.submit(request("a", [1] * 7, 3, loops=Loops(1)))
    driver.submit(request("b", [2] * 8, 3, loops=EXITS))
    driver.submit(request("c", [3] * 2, 3))
    driver.run()
    # The one row of room beside a's prompt is not for a piece of b's, nor is c to overtake.
    lengths = [[span.length for span in plan.spans] for plan in driver.plans if plan.spans]
    assert lengths == [[7], [1], [1], [8], [1, 2], [1, 1], [1]]
    driver.check_answers()


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_replay_is_the_prompt_and_one_row_a_token_with_its_loops(multiple):
    driver = Driver(bound(chunk_multiple=multiple), depth=2)
    depths = [0, 3, 1, 2, 1]
    message = replayed("a", [4, 5, 6], depths)
    driver.submit(message)
    driver.submit(request("b", [1, 2], 9))
    driver.run()
    own = [span for span, owner in driver.rows() if owner is message]
    given = [plan.tokens for plan in driver.plans if "a" in plan.owners]
    assert [shape(span) for span in own[:7]] == [
        (0, 3, False, False, Wanted.NONE, 0),
        (3, 1, False, False, Wanted.NONE, 3),
        (4, 1, False, False, Wanted.NONE, 1),
        (5, 1, False, False, Wanted.NONE, 2),
        (6, 1, False, False, Wanted.NONE, 1),
        (7, 1, False, True, Wanted.LAST, 0),
        (8, 1, True, True, Wanted.LAST, 0),
    ]
    # b's prompt shares the first step, and its rows are fed.
    assert given[0] == (4, 5, 6, 1, 2)
    assert [tokens[0] for tokens in given[1:6]] == message.generated
    driver.check_answers()
    assert len(driver.answers["a"].tokens) == 12 - 5


def test_rows_of_several_loops_share_steps_with_all_others():
    driver = Driver(bound(), depth=1)
    driver.submit(replayed("a", [4, 5, 6], [0, 3, 1]))
    driver.submit(request("b", [7, 8], 6, loops=Loops(2)))
    driver.submit(request("c", [1] * 11, 6))
    driver.run()
    # c's prompt takes the room that is left, and goes on beside single rows.
    assert [[(span.slot, span.length) for span in plan.spans] for plan in driver.plans[:3]] == [
        [(0, 3), (1, 2), (2, 11)],
        [(1, 1), (2, 1), (0, 1)],
        [(1, 1), (2, 1), (0, 1)],
    ]
    driver.check_answers()


def test_a_preempted_sequence_is_replayed_with_the_loops_that_it_ran():
    driver = Driver(bound(max_slots=2, num_blocks=5, max_model_len=20), depth=1)
    driver.submit(request("a", [1, 2, 3], 12, loops=EXITS))
    driver.submit(request("b", [4, 5, 6], 12, loops=Loops(4, [0.1, 0.2, 0.3])))
    driver.run()
    assert driver.scheduler.stats().preemptions == 1
    again = [span.depth for span, message in driver.rows() if span.depth and message.request_id == "b"]
    assert again == driver.answers["b"].depths[1 : len(again) + 1]
    assert len(again) >= 5
    driver.check_answers()


def test_a_failed_step_forgets_its_own_rows_loops_and_no_others():
    driver = Driver(bound(), depth=2)
    driver.submit(request("a", [1, 2, 3], 12, loops=EXITS))
    driver.submit(request("b", [4, 5], 12, loops=EXITS))
    for number in range(40):
        driver.device.flaky = float(number == 6)
        driver.step()
    driver.run()
    assert [answer.final.finish for answer in driver.answers.values()] == ["length", "length"]
    driver.check_answers()


def test_neither_blocks_nor_waiting_are_shared_with_several_loops():
    driver = Driver(bound(prefix_cache=True), depth=0)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for name, loops in (("a", None), ("b", Loops(2)), ("c", Loops(2)), ("d", Loops(3)), ("e", None), ("f", Loops(1))):
        driver.submit(request(name, prompt, 2, loops=loops))
        driver.run()
    assert [driver.answers[name].cached for name in "abcdef"] == [0, 0, 0, 0, 8, 8]
    # Samples of one request: of one loop they wait for the first one's blocks, of several they start at once.
    for loops, starts in ((None, [1, 2]), (Loops(2), [3])):
        fresh = Driver(bound(prefix_cache=True, max_batch_tokens=40), depth=0)
        for name in ("0", "1", "2"):
            fresh.submit(request(name, prompt, 2, loops=loops, group="g"))
        fresh.run()
        assert [len(plan.allocs) for plan in fresh.plans if plan.allocs] == starts
        fresh.check_answers()
    driver.check_answers()


def test_a_sample_of_one_loop_does_not_wait_for_one_of_several():
    driver = Driver(bound(prefix_cache=True, max_batch_tokens=40), depth=0)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    driver.submit(request("a", prompt, 2, loops=Loops(2), group="g"))
    driver.submit(request("b", prompt, 2, group="g"))
    assert len(driver.plan().allocs) == 2


def test_prompt_logprobs_of_a_whole_prompt():
    driver = Driver(bound(max_scored_rows=6), depth=1)
    assert driver.submit(request("a", [1, 2, 3, 4, 5, 6], 3, loops=EXITS, prompt_logprobs=1)) is None
    assert driver.submit(request("b", [1, 2, 3, 4, 5], 3, loops=EXITS, prompt_logprobs=1)) is None
    driver.run()
    # Both fit into a step, but not what may be scored in one.
    assert [[span.length for span in plan.spans] for plan in driver.plans[:2]] == [[6], [1, 5]]
    driver.check_answers()


def test_a_model_that_takes_every_prompt_in_one_piece_scores_it_whole_with_several_loops_too():
    driver = Driver(bound(max_scored_rows=6, single_chunk=True), depth=1)
    assert driver.submit(request("a", [1] * 9, 3, loops=EXITS, prompt_logprobs=1)) is None
    assert driver.submit(replayed("b", [1, 2], [0, 2, 3, 1])) is None
    driver.run()
    driver.check_answers()


REFUSED = {
    "more loops than the model has": ({"loops": Loops(5)}, "loops are 5, this model has at most 4"),
    "a threshold too few": ({"loops": Loops(4, [0.5, 0.5])}, "2 exit thresholds, 4 loops have 3, or none"),
    "a threshold of one loop": ({"loops": Loops(1, [0.5])}, "1 exit thresholds, 1 loops have 0, or none"),
    "no depths": ({"loops": EXITS, "generated": [3, 4]}, "0 depths are given for 2 generated tokens"),
    "a depth too few": ({"loops": EXITS, "generated": [3, 4], "depths": [0]}, "1 depths are given for 2 generated tokens"),
    "a depth too many": ({"loops": EXITS, "generated": [3], "depths": [0, 2]}, "2 depths are given for 1 generated tokens"),
    "a depth of the prompt's row": ({"loops": EXITS, "generated": [3, 4], "depths": [1, 2]}, "depths must be 0 for the first"),
    "a row without a depth": ({"loops": EXITS, "generated": [3, 4], "depths": [0, 0]}, "and 1 to 3 for the others"),
    "a depth past the most": ({"loops": EXITS, "generated": [3, 4], "depths": [0, 4]}, "and 1 to 3 for the others"),
    "depths of no loops": ({"generated": [3, 4], "depths": [0, 1]}, "2 depths are given for a sequence of one loop"),
    "depths of one loop": ({"loops": Loops(1), "generated": [3], "depths": [0]}, "1 depths are given for a sequence of one loop"),
    "a prompt that no step holds": (
        {"loops": EXITS, "prompt": [1] * 17},
        "prompt has 17 tokens; with more than one loop it is computed in one piece, and a step has at most 16 tokens "
        "(max_num_batched_tokens)",
    ),
    "a prompt too long to be scored": (
        {"loops": EXITS, "prompt": [1] * 13, "prompt_logprobs": 0},
        "prompt has 13 tokens; with more than one loop it is computed in one piece, and prompt_logprobs are given for pieces of at "
        "most 12 tokens",
    ),
}


@pytest.mark.parametrize(("changes", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_served_is_refused_and_no_other(changes, text):
    driver = Driver(bound(max_scored_rows=12))
    driver.submit(request("good", [1, 2], 4, loops=EXITS))
    update = driver.submit(request("bad", **{"prompt": [1, 2], "max_tokens": 9, **changes}))
    assert (update.finish, update.status) == ("error", 400)
    assert text in update.error
    driver.run()
    assert driver.answers["good"].final.finish == "length"
    driver.check_answer("good")


def test_the_limits_of_several_loops_are_not_those_of_one():
    driver = Driver(bound(max_scored_rows=12))
    assert driver.submit(request("a", [1] * 17, 4)) is None
    assert driver.submit(request("b", [1] * 17, 4, loops=Loops(1), prompt_logprobs=0)) is None
    assert driver.submit(request("c", [1] * 16, 4, loops=Loops(4))) is None
    driver.run()
    driver.check_answers()


def test_a_model_that_is_not_looped_refuses_several():
    driver = Driver(limits())
    assert driver.submit(request("a", [1, 2], loops=Loops(1))) is None
    assert "this model has 1: it is not looped" in driver.submit(request("b", [1, 2], loops=Loops(2))).error
    driver.run()


def told(scheduler, depth):
    """The updates of the next step, whose only row samples after so many loops."""
    plan = scheduler.plan()
    scheduler.launched(plan)
    return scheduler.complete(StepResult(plan=plan, spans=(SpanResult(token=3, depth=depth),)))


@pytest.mark.parametrize("right", [[], [0], [0, 2]])
@pytest.mark.parametrize("wrong", [0, 1, 4])
def test_results_whose_loops_cannot_be_are_a_broken_contract(right, wrong):
    scheduler = Scheduler(bound())
    scheduler.submit(request("a", [1, 2], 4, loops=EXITS))
    assert [update.depths for depth in right for update in told(scheduler, depth)] == [[depth] for depth in right]
    if wrong == min(len(right), 1):
        assert told(scheduler, wrong)
        return
    with pytest.raises(SchedulerError, match=f"a ran {wrong} loops at position {1 + len(right)}"):
        told(scheduler, wrong)


def test_updates_of_one_loop_have_no_depths():
    scheduler = Scheduler(bound())
    scheduler.submit(request("a", [1, 2], 4, loops=Loops(1)))
    assert [update.depths for _ in range(3) for update in told(scheduler, 1)] == [[], [], []]


# Epochs: everything that lives is submitted anew, to other engines, with what its client has seen.


def next_epoch(driver: Driver, random: Random) -> list[Submit]:
    """What the frontend's journal would send of the requests that have not ended."""
    return [
        msgspec.structs.replace(
            message,
            generated=[*message.generated, *driver.answers[name].tokens],
            depths=[*message.depths, *driver.answers[name].depths],
            suspicions=message.suspicions + (random.random() < 0.1),
        )
        for name, message in driver.messages.items()
        if driver.answers[name].final is None
    ]


def drive_epochs(seed: int) -> tuple[int, int]:
    """A random mix through epochs with failing steps and preemptions; (rows replayed for epochs, for other reasons)."""
    random = Random(seed)
    sizes = random_limits(random)
    sizes = replace(sizes, max_loops=4, max_batch_tokens=sizes.max_batch_tokens + random.choice([0, 20]))
    positions = min(sizes.max_model_len, sizes.num_blocks * sizes.block_size)
    pending = [message for n in range(6) for message in random_messages(random, n, positions, sizes.max_loops)]
    for name in "abcde":
        prompt, loops = random_prompt(random, 6), random_loops(random, 4)
        pending.append(request(name, prompt, positions - len(prompt), loops=loops, ignore_eos=True))
    random.shuffle(pending)
    counts = [0, 0]
    for epoch in range(6):
        driver = Driver(sizes, depth=random.randint(0, 2))
        driver.device.exits = Random(f"{seed} {epoch}")
        driver.device.flaky = random.choice([0.0, 0.05, 0.1])
        for message in pending:
            driver.submit(message)
        steps = 20_000 if epoch == 5 else random.choice([1, 3, 10, 30])
        for _ in range(steps):
            if pending and random.random() < 0.01:
                driver.abort(random.choice(sorted(driver.messages)))
            if not driver.step() and not driver.give_masks():
                break
        for span, message in driver.rows():
            if span.depth:
                counts[span.start + 1 - len(message.prompt) >= len(message.depths)] += 1
        for name, answer in driver.answers.items():
            if answer.final is not None:
                driver.check_answer(name)
        pending = next_epoch(driver, random)
    assert not pending, "starvation: the mix does not come to its end"
    driver.check_end()
    return counts[0], counts[1]


def test_tokens_through_epochs_failures_and_preemptions_are_those_of_the_noted_loops():
    counts = [drive_epochs(seed) for seed in range(100)]
    assert sum(epochs for epochs, _ in counts) > 500
    assert sum(others for _, others in counts) > 250


def test_the_oracle_tells_lost_and_shifted_loops():
    depths = [0, 3, 1, 2, 2]
    tokens = run_looped([1, 2], depths)
    for other in ([0, 3, 1, 2, 1], [0, 1, 3, 2, 2], [0, 0, 3, 1, 2], [3, 1, 2, 2, 0]):
        assert run_looped([1, 2], other) != tokens
