"""Suspects of failed epochs and batches run alone, and replays keep their place: what the next epoch's scheduler does with them."""

from __future__ import annotations

from random import Random

import pytest
from driver import Driver, limits, random_prompt, request
from fake_device import run_alone

PROMPT = [1, 2, 1]
ALONE, _ = run_alone(PROMPT, 12, frozenset())


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("suspicions", [0, 1, 2, 5])
def test_from_two_suspicions_on_a_sequence_runs_alone_to_its_end(suspicions, depth):
    driver = Driver(limits(max_slots=6, max_batch_tokens=30), depth=depth)
    for number in range(6):
        driver.submit(request(str(number), PROMPT, 6, suspicions=suspicions if number == 3 else 0))
    driver.run()
    driver.check_answers()
    named = [plan for plan in driver.plans if "3" in plan.owners]
    alone = [plan for plan in driver.plans if plan.alone]
    assert all(plan.owners == ("3",) for plan in alone)
    if suspicions < 2:
        assert alone == []
        assert len([plan for plan in driver.plans if plan.spans]) == 6
    else:
        assert len(alone) == 6
        assert named == alone


def test_a_long_prompt_of_a_suspect_is_alone_in_every_piece():
    driver = Driver(limits(), depth=0)
    driver.submit(request("others", PROMPT, 12))
    driver.submit(request("suspect", [3] * 40, 4, suspicions=2))
    driver.run()
    driver.check_answers()
    pieces = [plan for plan in driver.plans if plan.alone]
    assert [sum(span.length for span in plan.spans) for plan in pieces] == [16, 16, 8, 1, 1, 1]
    between = driver.plans[driver.plans.index(pieces[0]) : driver.plans.index(pieces[1])]
    assert [plan.owners for plan in between[1:]] == [("others",)], "the others are in turn"


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_are_not_kept_waiting_by_the_suspects_before_them(depth):
    driver = Driver(limits(max_slots=6), depth=depth)
    for number in range(3):
        driver.submit(request(f"suspect{number}", PROMPT, 20, suspicions=2))
    for number in range(3):
        driver.submit(request(f"new{number}", PROMPT, 4))
    driver.run()
    driver.check_answers()
    first = {name: next(at for at, plan in enumerate(driver.plans) if name in plan.owners) for name in driver.answers}
    assert max(first[f"new{number}"] for number in range(3)) <= 2
    assert sorted(first, key=first.__getitem__)[-2:] == ["suspect1", "suspect2"], "one suspect at a time, in order"


def test_one_suspicion_and_one_failed_batch_make_a_suspect():
    driver = Driver(limits(), depth=0)
    driver.submit(request("a", PROMPT, 5))
    driver.submit(request("b", PROMPT, 5, suspicions=1))
    plan = driver.plan()
    driver.scheduler.launched(plan)
    driver.take(driver.scheduler.fail(plan, "no memory"))
    driver.run()
    assert [plan.owners for plan in driver.plans if plan.alone] == [("b",)]
    driver.check_answers()


def test_a_suspect_that_fails_alone_gets_the_error_and_nobody_else_does():
    driver = Driver(limits(), depth=1, evil=frozenset({"evil"}))
    for name, suspicions in (("a", 2), ("evil", 2), ("b", 2), ("c", 0)):
        driver.submit(request(name, PROMPT, 8, suspicions=suspicions))
    driver.run()
    assert {name for name, answer in driver.answers.items() if answer.final.finish == "error"} == {"evil"}
    assert all(driver.answers[name].tokens == ALONE[:8] for name in ("a", "b", "c"))
    assert all(plan.alone for plan in driver.plans if "evil" in plan.owners)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_suspect_that_waits_for_a_mask_keeps_nobody_waiting(depth):
    driver = Driver(limits(), depth=depth)
    driver.submit(request("masked", PROMPT, 6, suspicions=2, grammar=True))
    while not driver.owed:
        driver.step()
    # Another epoch begins in the middle of its answer.
    driver = Driver(limits(), depth=depth)
    driver.submit(request("masked", PROMPT, 6, suspicions=2, grammar=True, generated=ALONE[:2]))
    driver.submit(request("other", PROMPT, 6, suspicions=3))
    driver.submit(request("third", PROMPT, 6))
    while driver.answers["third"].final is None:
        assert driver.step()
    turns = len(driver.answers["other"].tokens)
    assert turns >= 4
    assert driver.answers["other"].tokens == ALONE[:turns]
    assert driver.answers["masked"].tokens == ALONE[2:3]
    driver.run()
    driver.check_answers()


def test_replays_keep_their_place_before_new_requests_and_are_never_refused_for_the_queue():
    driver = Driver(limits(max_slots=2, max_queue=2), depth=1)
    for number in range(4):
        assert driver.submit(request(f"old{number}", PROMPT, 12, generated=ALONE[: 1 + number])) is None
    for number in range(3):
        assert driver.submit(request(f"older{number}", PROMPT, 12, suspicions=1)) is None
    assert driver.submit(request("new", PROMPT, 3)).status == 429
    driver.submit(request("urgent", PROMPT, 12, generated=ALONE[:2], priority=-1))
    driver.run()
    started = [alloc.request_id for plan in driver.plans for alloc in plan.allocs]
    assert started == ["urgent", *(f"old{n}" for n in range(4)), *(f"older{n}" for n in range(3))]
    assert driver.answers.pop("new").final.status == 429
    del driver.messages["new"]
    driver.check_answers()


@pytest.mark.parametrize("seed", range(6))
def test_an_epoch_that_is_replayed_at_any_moment_gives_the_same_tokens(seed):
    """Kill an epoch after some steps, submit what is unfinished again, and so on: every answer is as if nothing had happened."""
    random = Random(seed)
    prompts = {str(number): random_prompt(random, 9) for number in range(8)}
    seen: dict[str, list[int]] = {name: [] for name in prompts}
    suspicions = dict.fromkeys(prompts, 0)
    ends: dict[str, str] = {}
    for epoch in range(30):
        if len(ends) == len(prompts):
            break
        driver = Driver(limits(num_blocks=24, prefix_cache=seed % 2 == 0), depth=random.randint(0, 2))
        for name in (name for name in prompts if name not in ends):
            driver.submit(
                request(name, prompts[name], 10, generated=list(seen[name]), ignore_eos=True, suspicions=suspicions[name])
            )
            suspicions[name] += 1
        for _ in range(1000 if epoch == 29 else random.randint(1, 8)):
            driver.step()
        for name, answer in driver.answers.items():
            seen[name] += answer.tokens
            if answer.final is not None:
                ends[name] = answer.final.finish
    assert set(ends.values()) == {"length"}
    assert seen == {name: run_alone(prompt, 10, frozenset())[0] for name, prompt in prompts.items()}


@pytest.mark.parametrize("known", [1, 30, 59, 60])
def test_a_replay_that_fills_the_context(known):
    """Prompt and answer together are exactly as long as the longest sequence; `known` tokens were given before."""
    tokens, _ = run_alone([1, 2, 3], 61, frozenset())
    driver = Driver(limits(max_model_len=64, num_blocks=16), depth=1)
    driver.submit(request("a", [1, 2, 3], 61, generated=tokens[:known], ignore_eos=True))
    driver.submit(request("b", [9], 20, ignore_eos=True))
    driver.run()
    assert driver.answers["a"].tokens == tokens[known:]
    driver.check_answers()


def test_prompt_logprobs_come_again_only_for_a_replay_without_tokens():
    driver = Driver(limits(max_batch_tokens=4), depth=0)
    driver.submit(request("a", [4] * 10, 3, prompt_logprobs=1))
    driver.step()
    first = dict(driver.answers["a"].prompt_logprobs)
    assert 0 < len(first) < 9
    again = Driver(limits(max_batch_tokens=4), depth=0)
    again.submit(request("a", [4] * 10, 3, prompt_logprobs=1, suspicions=1))
    again.run()
    again.check_answers()
    assert first.items() <= again.answers["a"].prompt_logprobs.items()
    later = Driver(limits(max_batch_tokens=4), depth=0)
    later.submit(request("a", [4] * 10, 3, prompt_logprobs=1, generated=again.answers["a"].tokens[:1]))
    later.run()
    assert later.answers["a"].prompt_logprobs == {}
