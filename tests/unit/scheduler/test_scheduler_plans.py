"""What plans contain: order, chunks, wanted rows, budgets, blocks."""

from __future__ import annotations

import pytest
from driver import Driver, limits, request

from ep_runtime.scheduler.core import Plan
from protocol.commands import Wanted


def owned(plan: Plan) -> list[tuple[str, int]]:
    return [(owner, span.length) for owner, span in zip(plan.owners, plan.spans, strict=True)]


def test_decode_rows_come_first_then_running_prompts_then_new_ones():
    driver = Driver(limits(max_batch_tokens=10), depth=0)
    driver.submit(request("decoding", [1, 2], 20))
    driver.step()
    driver.submit(request("long", [3] * 15, 5))
    driver.step()
    driver.submit(request("new", [4] * 9, 5))
    driver.step()
    assert [owned(plan) for plan in driver.plans] == [
        [("decoding", 2)],
        [("decoding", 1), ("long", 9)],
        [("decoding", 1), ("long", 6), ("new", 3)],
    ]
    driver.run()
    driver.check_answers()


def test_lower_priority_values_start_first_and_arrival_decides_within_one():
    driver = Driver(limits(max_slots=1, max_batch_tokens=4))
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -2), ("e", 0)):
        driver.submit(request(name, [1], 1, priority=priority))
    driver.run()
    assert [alloc.request_id for plan in driver.plans for alloc in plan.allocs] == ["d", "b", "e", "a", "c"]


def test_a_new_prompt_does_not_overtake_one_that_does_not_fit_yet():
    driver = Driver(limits(num_blocks=8, max_batch_tokens=64), depth=0)
    driver.submit(request("first", [1] * 16, 4))
    driver.submit(request("large", [2] * 24, 4))
    driver.submit(request("small", [3], 4))
    driver.step()
    assert driver.plans[0].owners == ("first",)
    driver.run()
    assert driver.answers["small"].final.finish == "length"


def test_chunk_bounds_are_multiples_of_the_models_cut_points_except_the_last():
    driver = Driver(limits(max_batch_tokens=14, chunk_multiple=4))
    driver.submit(request("a", [1] * 27, 3))
    driver.submit(request("b", [2] * 13, 3))
    driver.run()
    ends = {"a": [], "b": []}
    for plan in driver.plans:
        for owner, span in zip(plan.owners, plan.spans, strict=True):
            if not span.fed:
                ends[owner].append(span.start + span.length)
    assert ends["a"] == [12, 24, 27]
    assert ends["b"] == [8, 13]


def test_a_single_chunk_model_takes_its_prompt_in_one_piece():
    driver = Driver(limits(max_batch_tokens=10, single_chunk=True), depth=0)
    driver.submit(request("a", [1, 2, 3], 20))
    driver.submit(request("b", [5] * 9, 4))
    driver.run()
    spans = [span for plan in driver.plans for owner, span in zip(plan.owners, plan.spans, strict=True) if owner == "b"]
    assert (spans[0].start, spans[0].length) == (0, 9)
    update = driver.scheduler.submit(request("c", [5] * 11, 4))
    assert update.status == 400
    assert "11" in update.error
    assert "10" in update.error


def test_wanted_rows_of_prompts_and_decode_rows():
    driver = Driver(limits(max_batch_tokens=6))
    driver.submit(request("a", [1] * 8, 2))
    driver.run()
    spans = [plan.spans[0] for plan in driver.plans if plan.spans]
    assert [(span.wanted, span.sampled, span.fed) for span in spans] == [
        (Wanted.NONE, False, False),
        (Wanted.LAST, True, False),
        (Wanted.LAST, True, True),
    ]


def test_prompt_logprobs_want_all_rows_use_no_prefix_and_arrive_once():
    driver = Driver(limits(max_batch_tokens=6, prefix_cache=True))
    driver.submit(request("warm", [1] * 13, 2))
    driver.run()
    driver.submit(request("a", [1] * 13, 2, prompt_logprobs=0))
    driver.run()
    spans = [span for plan in driver.plans for owner, span in zip(plan.owners, plan.spans, strict=True) if owner == "a"]
    assert [(span.length, span.wanted) for span in spans] == [(6, Wanted.ALL), (6, Wanted.ALL), (1, Wanted.LAST), (1, Wanted.LAST)]
    assert sorted(driver.answers["a"].prompt_logprobs) == list(range(1, 13))
    assert driver.answers["a"].cached == 0
    driver.check_answers()


def test_max_tokens_zero_computes_the_prompt_and_samples_nothing():
    driver = Driver(limits())
    driver.submit(request("a", [1, 2, 3, 4, 5], 0, prompt_logprobs=1))
    driver.run()
    assert not any(span.sampled for plan in driver.plans for span in plan.spans)
    assert driver.answers["a"].final.finish == "length"
    assert sorted(driver.answers["a"].prompt_logprobs) == [1, 2, 3, 4]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_no_row_is_planned_past_max_tokens(depth):
    driver = Driver(limits(), depth=depth)
    driver.submit(request("a", [1, 2, 3], 7))
    driver.run()
    assert sum(span.length for plan in driver.plans for span in plan.spans) == 3 + 7 - 1


def test_the_token_budget_holds_with_every_slot_decoding():
    driver = Driver(limits(max_slots=4, max_batch_tokens=4))
    for number in range(6):
        driver.submit(request(str(number), [number] * 5, 8))
    driver.run()
    assert max(sum(span.length for span in plan.spans) for plan in driver.plans) == 4
    driver.check_answers()


def test_the_lowest_free_slot_is_taken_first():
    driver = Driver(limits(max_slots=3), depth=0)
    for name, length in (("a", 9), ("b", 2), ("c", 9)):
        driver.submit(request(name, [1], length))
    driver.step()
    assert [alloc.slot for alloc in driver.plans[0].allocs] == [0, 1, 2]
    driver.step()
    driver.submit(request("d", [1], 3))
    driver.step()
    assert driver.plans[-1].frees == (1,)
    assert [alloc.slot for alloc in driver.plans[-1].allocs] == [1]


def test_what_can_never_fit_is_refused_with_numbers():
    driver = Driver(limits(max_model_len=100, num_blocks=10, block_size=4))
    for prompt, max_tokens, numbers in (
        ([1] * 90, 11, ("90", "11", "101", "100")),
        ([1] * 30, 12, ("30", "12", "11", "10")),
        ([], 3, ("empty",)),
        ([1], -1, ("-1",)),
    ):
        update = driver.scheduler.submit(request("x", prompt, max_tokens))
        assert (update.finish, update.status) == ("error", 400)
        assert all(number in update.error for number in numbers), update.error
    # 40 positions are computed: the last of the 41 tokens is never fed.
    assert driver.submit(request("fits", [1] * 30, 11)) is None
    driver.run()
    driver.check_answers()


def test_a_full_queue_is_refused_with_429_but_never_a_request_in_the_middle_of_its_answer():
    driver = Driver(limits(max_slots=2, max_queue=3, retry_after=2.5))
    for number in range(5):
        assert driver.submit(request(str(number), [number], 4)) is None
    update = driver.submit(request("over", [1], 4))
    assert (update.finish, update.status, update.retry_after) == ("error", 429, 2.5)
    assert driver.submit(request("replayed", [1], 4, generated=[run_first()])) is None
    driver.run()
    driver.check_answers()


def run_first() -> int:
    from fake_device import next_token

    return next_token([1])


def test_admission_leaves_room_so_that_no_one_is_preempted_at_once():
    driver = Driver(limits(num_blocks=9, max_batch_tokens=64), depth=0)
    driver.submit(request("a", [1] * 16, 12))
    driver.step()
    driver.submit(request("b", [2] * 16, 3))
    driver.step()
    assert driver.plans[-1].owners == ("a",), "4 of 5 free blocks would leave one block for two sequences"
    driver.run()
    assert driver.scheduler.stats().preemptions == 0
    driver.check_answers()


def test_limits_that_could_starve_a_prompt_are_refused():
    with pytest.raises(ValueError, match="max_batch_tokens is 7"):
        limits(max_slots=8, max_batch_tokens=7)
    with pytest.raises(ValueError, match="at least 11"):
        limits(max_slots=8, max_batch_tokens=8, chunk_multiple=4)
    with pytest.raises(ValueError, match="num_blocks is 0"):
        limits(num_blocks=0)


def test_prompt_rows_that_are_scored_are_bounded_and_others_are_not():
    """Logits of every prompt row would take more memory than the rest of the step."""
    driver = Driver(limits(max_batch_tokens=16, max_scored_rows=6), depth=0)
    driver.submit(request("scored", [1] * 14, 2, prompt_logprobs=1))
    driver.submit(request("plain", [2] * 20, 2))
    driver.submit(request("later", [3] * 9, 2, prompt_logprobs=0))
    driver.run()
    for plan in driver.plans:
        assert sum(span.length for span in plan.spans if span.wanted is Wanted.ALL) <= 6
    assert owned(driver.plans[0]) == [("scored", 6), ("plain", 10)]
    driver.check_answers()


def test_a_bound_on_scored_rows_below_one_chunk_is_refused():
    with pytest.raises(ValueError, match="max_scored_rows is 3"):
        limits(max_scored_rows=3, chunk_multiple=4)
