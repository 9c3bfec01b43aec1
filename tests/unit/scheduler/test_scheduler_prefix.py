"""Shared prefixes: what may be entered, what may be hit, and how samples of one request share their prompt."""

from __future__ import annotations

import pytest
from driver import Driver, limits, request
from fake_device import run_alone

from ep_runtime.scheduler.prefix import block_digest, root_digest


def cached(**changes) -> Driver:
    return Driver(limits(prefix_cache=True, max_batch_tokens=64, **changes), depth=1)


def hit(driver: Driver, prompt: list[int], **changes) -> int:
    """Prefix length that a request with this prompt starts from."""
    name = f"probe{len(driver.messages)}"
    driver.submit(request(name, prompt, 1, **changes))
    driver.run()
    lengths = [alloc.prefix_length for plan in driver.plans for alloc in plan.allocs if alloc.request_id == name]
    assert lengths == [driver.answers[name].cached]
    return lengths[0]


@pytest.mark.parametrize(("length", "expected"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_hits_are_whole_blocks_and_leave_the_last_token_to_compute(length, expected):
    driver = cached()
    prompt = list(range(12))
    driver.submit(request("a", prompt, 1))
    driver.run()
    assert hit(driver, prompt[:length]) == expected
    driver.check_answers()


def test_hits_end_at_the_models_cut_points():
    driver = cached(chunk_multiple=8)
    driver.submit(request("a", [1] * 24, 1))
    driver.run()
    assert hit(driver, [1] * 13 + [2]) == 8


def test_a_block_is_known_by_all_tokens_before_it_and_by_its_adapter():
    driver = cached()
    driver.submit(request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1))
    driver.run()
    assert hit(driver, [9, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert hit(driver, [1, 2, 3, 4, 0, 6, 7, 8, 9]) == 4
    assert hit(driver, [1, 2, 3, 4, 5, 6, 7, 8, 9], adapter=1) == 0
    assert len({root_digest(0), root_digest(1), block_digest(root_digest(0), [1]), block_digest(root_digest(1), [1])}) == 4
    assert len(root_digest(0)) * 8 >= 128


def test_generated_tokens_are_entered_with_their_positions():
    driver = cached()
    tokens, _ = run_alone([1, 2, 3], 10, frozenset())
    driver.submit(request("a", [1, 2, 3], 10))
    driver.run()
    # 12 of the 13 tokens were fed, the last one never was.
    assert hit(driver, [1, 2, 3, *tokens, 5]) == 12
    driver.check_answers()


def test_a_wasted_row_is_never_entered():
    tokens, _ = run_alone([1, 2, 3], 3, frozenset())
    driver = cached(block_size=2)
    driver.submit(request("a", [1, 2, 3], 9, stop_token_ids=[tokens[2]]))
    driver.run()
    rows = [span.start + span.length for plan in driver.plans for span in plan.spans]
    assert max(rows) == 6, "a wasted row at position 5 completes the third block"
    assert len(driver.owner().tree) == 2
    assert hit(driver, [1, 2, 3, *tokens, 7]) == 4


def test_an_aborted_sequences_unread_steps_are_not_entered():
    driver = Driver(limits(prefix_cache=True, max_batch_tokens=8), depth=1)
    driver.submit(request("a", [1] * 20, 4))
    driver.step()
    driver.step()
    driver.abort("a")
    driver.run()
    # Of the two steps of 8 positions, one was read before the abort.
    assert len(driver.owner().tree) == 2


def test_samples_of_one_request_compute_their_prompt_once():
    driver = cached(num_blocks=64)
    for index in range(4):
        driver.submit(request(f"s{index}", [3] * 14, 4, group="g"))
    driver.run()
    driver.check_answers()
    prompt_rows = sum(span.length for plan in driver.plans for span in plan.spans if not span.fed)
    assert prompt_rows == 14 + 3 * 2
    assert [driver.answers[f"s{index}"].cached for index in range(4)] == [0, 12, 12, 12]
    assert driver.scheduler.stats().cached_tokens == 36
    assert driver.scheduler.stats().prompt_tokens == 56


def test_samples_run_side_by_side_without_the_cache():
    driver = Driver(limits(max_batch_tokens=64, num_blocks=64))
    for index in range(4):
        driver.submit(request(f"s{index}", [3] * 14, 4, group="g"))
    driver.step()
    assert len(driver.plans[0].allocs) == 4
    driver.run()
    driver.check_answers()


def test_a_sample_waits_no_longer_when_the_one_that_computes_is_aborted():
    driver = Driver(limits(prefix_cache=True, max_batch_tokens=8), depth=1)
    for index in range(3):
        driver.submit(request(f"s{index}", [3] * 30, 4, group="g"))
    driver.step()
    driver.abort("s0")
    driver.run()
    assert driver.answers["s2"].final.finish == "length"
    driver.check_answers()


def test_different_prompts_of_one_request_do_not_wait_for_each_other():
    driver = cached()
    driver.submit(request("a", [1] * 9, 2, group="g"))
    driver.submit(request("b", [2] * 9, 2, group="g"))
    driver.step()
    assert driver.plans[0].owners == ("a", "b")
    driver.run()


def test_evictable_blocks_count_as_free_in_admission():
    driver = cached(num_blocks=8)
    driver.submit(request("a", [1] * 24, 4))
    driver.run()
    driver.submit(request("b", [2] * 28, 4))
    driver.run()
    assert driver.answers["b"].final.finish == "length"
    assert hit(driver, [1] * 24) == 0
    driver.check_answers()
