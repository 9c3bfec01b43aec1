"""Images in the scheduler: room for their rows, waiting for their encoding, and prefixes that are keyed by their contents."""

from __future__ import annotations

from random import Random

import pytest
from driver import Driver, limits, picture, request
from fake_device import PLACEHOLDER, rendered
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_runtime.scheduler.core import SchedulerError
from ep_runtime.scheduler.prefix import PrefixTree, block_digest, images_within, root_digest
from ep_runtime.scheduler.results import make_sequence

P = PLACEHOLDER


def shown(request_id: str, parts: list, max_tokens: int = 2, **changes):
    """A request from tokens and (rows, contents) of images."""
    prompt: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, tuple):
            images.append(picture(len(prompt), *part))
        prompt += [P] * part[0] if isinstance(part, tuple) else [part]
    return request(request_id, prompt, max_tokens, images=images, **changes)


def started(driver: Driver) -> list[str]:
    return [alloc.request_id for plan in driver.plans for alloc in plan.allocs]


# Waiting for the encoding


def test_nobody_overtakes_one_whose_images_are_to_be_encoded_and_what_runs_goes_on():
    driver = Driver(limits(max_image_tokens=8), depth=0)
    driver.submit(request("running", [1], 20))
    driver.step()
    driver.submit(shown("image", [5, (4, 0), 6]))
    driver.submit(request("text", [7], 2))
    for _ in range(3):
        plan = driver.plan()
        assert plan is not None
        assert plan.owners == ("running",)
        driver.launch(plan)
        driver.read()
    assert driver.encode()
    plan = driver.plan()
    assert plan is not None
    assert plan.owners == ("running", "image", "text")
    driver.launch(plan)
    driver.run()
    driver.check_answers()


def test_nothing_is_due_once_all_waiting_images_are_encoded():
    driver = Driver(limits(max_slots=1, max_batch_tokens=16, max_image_tokens=8), depth=0, cache_rows=20)
    driver.submit(request("running", [1], 20))
    driver.step()
    for number in range(4):
        driver.submit(shown(str(number), [(3, number), 1]))
    assert driver.scheduler.images_due
    assert [driver.encode() for _ in range(5)] == [True, True, True, True, False]
    assert not driver.scheduler.images_due
    driver.step()
    assert not driver.scheduler.images_due
    driver.run()
    assert [name for name, _ in driver.encodings] == ["0", "1", "2", "3"], "each is encoded once, in order"


def test_whole_prompts_are_named_in_order_each_contents_once():
    driver = Driver(limits(max_slots=2, max_image_tokens=9), depth=0)
    driver.submit(shown("a", [(3, 0), 1, (3, 1), (3, 0)]))
    driver.submit(shown("b", [(3, 1), 2, (2, 2)]))
    driver.submit(shown("urgent", [1, (2, 3)], priority=-1))
    driver.submit(shown("c", [(9, 4)]))
    named = [(w.request_id, w.index) for w in driver.scheduler.next_images(10)]
    assert named == [("urgent", 0), ("a", 0), ("a", 1), ("b", 1)]
    assert [w.request_id for w in driver.scheduler.next_images(9)] == ["urgent", "a", "a"]
    assert [w.request_id for w in driver.scheduler.next_images(1)] == ["urgent"], "the first one is named whatever it has"
    driver.run()
    driver.check_answers()


def test_suspects_that_wait_for_another_one_come_last():
    driver = Driver(limits(max_slots=4, max_image_tokens=8), depth=0, cache_rows=40)
    for name, suspicions in (("s0", 2), ("s1", 3), ("a", 0), ("s2", 2), ("b", 0)):
        driver.submit(shown(name, [(2, len(driver.messages)), 1], 6, suspicions=suspicions))
    wanted = driver.scheduler.next_images(40)
    assert [w.request_id for w in wanted] == ["s0", "a", "b", "s1", "s2"]
    assert [w.alone for w in wanted] == [True, False, False, True, True]
    driver.run()
    driver.check_answers()
    assert all(plan.alone for plan in driver.plans if {"s0", "s1", "s2"}.intersection(plan.owners))


def test_a_failed_encoding_and_an_abort_let_the_next_one_start():
    bad = picture(0, 3, 7).digest
    driver = Driver(limits(max_image_tokens=8), depth=1, unfit=frozenset({bad}))
    driver.submit(shown("bad", [(3, 7), 1]))
    driver.submit(shown("gone", [(2, 1), 1]))
    driver.submit(shown("good", [(2, 2), 1]))
    driver.abort("gone")
    driver.run()
    assert {name: answer.final.finish for name, answer in driver.answers.items()} == {
        "bad": "error",
        "gone": "abort",
        "good": "length",
    }
    assert driver.answers["bad"].final.status == 500


# Room for rows


def test_a_prompt_with_more_rows_than_are_served_at_once_is_refused():
    driver = Driver(limits(max_image_tokens=8))
    update = driver.submit(shown("a", [(5, 0), 1, (4, 1)]))
    assert update is not None
    assert update.status == 400
    assert "9" in update.error
    assert "8" in update.error
    assert Driver(limits()).submit(shown("a", [(1, 0)])).status == 400


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_rows_return_with_the_results_of_the_last_piece_that_needs_them(depth):
    driver = Driver(limits(max_batch_tokens=6, max_image_tokens=6), depth=depth)
    driver.submit(shown("first", [1, (6, 0), *range(10)], 8))
    driver.submit(shown("second", [(6, 1), 2], 2))
    reached = 0
    while "second" not in started(driver):
        driver.step()
        (first,) = [seq for seq in driver.scheduler._life.holders() if seq.request_id == "first"]
        # Pieces end at 6 and 12: the second one passes the image's end at 7.
        read = len(driver.plans) - len(driver.queue)
        reached = max(reached, read)
        assert first.image_rows == (6 if read < 2 else 0)
    assert reached >= 2
    assert driver.answers["first"].final is None, "the second starts long before the first has ended"
    driver.run()
    driver.check_answers()


def test_a_preempted_sequence_gets_its_rows_anew():
    driver = Driver(limits(max_slots=3, block_size=2, num_blocks=12, max_model_len=24, max_image_tokens=8), depth=1, cache_rows=8)
    for number in range(3):
        driver.submit(shown(str(number), [(4, number), 1], 16, ignore_eos=True))
    driver.run()
    driver.check_answers()
    assert driver.scheduler.stats().preemptions > 0
    allocs = [alloc for plan in driver.plans for alloc in plan.allocs]
    assert len(allocs) > 3
    assert all(alloc.images and alloc.skipped == 0 for alloc in allocs)


def test_a_discarded_plan_returns_its_rows_and_a_failed_one_too():
    driver = Driver(limits(max_image_tokens=4), depth=0)
    rows = driver.scheduler._life.rows
    driver.submit(shown("a", [(4, 0), 1], 4))
    driver.submit(request("b", [1], 4))
    driver.encode()
    for half_sent in (False, True):
        plan = driver.plan()
        assert rows.available == 0
        driver.discard(plan, half_sent=half_sent)
        assert rows.available == 4
    plan = driver.plan()
    driver.scheduler.launched(plan)
    driver.device.move_slots(plan)
    driver.take(driver.scheduler.fail(plan, "no memory"))
    assert rows.available == 4
    driver.run()
    driver.check_answers()


def test_the_books_of_rows_see_damage():
    driver = Driver(limits(max_image_tokens=4, max_batch_tokens=4), depth=0)
    driver.submit(shown("a", [(4, 0), 1, 2, 3], 4))
    driver.encode()
    driver.launch(driver.plan())
    driver.scheduler._live["a"].image_rows -= 1
    with pytest.raises(SchedulerError, match="slots hold 3 rows of images, books say 4 of 4"):
        driver.scheduler.check_integrity()
    with pytest.raises(SchedulerError, match="1 rows of images are taken, 0 of 4 are available"):
        driver.scheduler._life.rows.take(1)
    with pytest.raises(SchedulerError, match="5 rows of images return, 4 are held"):
        driver.scheduler._life.rows.give(5)
    driver.scheduler._live["a"].image_rows += 1
    driver.submit(shown("waiting", [(4, 1)]))
    driver.scheduler._life.queue._illustrated.clear()
    with pytest.raises(SchedulerError, match="sequences with images"):
        driver.scheduler.check_integrity()


# Prefixes


def hits(driver: Driver, parts: list) -> tuple[int, int]:
    """(prefix length, skipped images) of a request with this prompt."""
    name = f"probe{len(driver.messages)}"
    driver.submit(shown(name, parts, 1))
    driver.run()
    (alloc,) = [alloc for plan in driver.plans for alloc in plan.allocs if alloc.request_id == name]
    driver.check_answers()
    return alloc.prefix_length, alloc.skipped


def cached(parts: list, **changes) -> Driver:
    driver = Driver(limits(prefix_cache=True, max_batch_tokens=64, max_image_tokens=16, **changes), depth=1)
    driver.submit(shown("known", parts, 1))
    driver.run()
    return driver


def test_an_image_is_found_again_whole_or_not_at_all():
    known = [1, 2, (6, 0), 3, 4, 5, 6, (4, 1), 7, 8]
    driver = cached(known)
    assert hits(driver, known) == (16, 2)
    # Blocks of 4: the first image ends with the second block, the second one with the fourth.
    assert hits(driver, [1, 2, (6, 0), 9, 9]) == (8, 1)
    assert hits(driver, [1, 2, (6, 0)]) == (0, 0), "the last token is computed, so the image would be cut"
    assert hits(driver, [1, 2, (6, 0), 3, 4, 5, 6, (4, 1)]) == (12, 1), "the same of the second image"
    assert hits(driver, [1, 2, (6, 5), 3, 4, 5, 6, (4, 1), 7, 8]) == (0, 0), "another image"
    assert hits(driver, [1, 2, (6, 0), 3, 4, 5, 6, (4, 5), 7, 8]) == (12, 1), "another second image"
    assert hits(driver, [1, (6, 0), 2, 3, 4, 5, 6, (4, 1), 7, 8]) == (0, 0), "at another place"


def test_a_hit_that_would_cut_an_image_ends_before_it():
    driver = cached([1, 2, 3, 4, 5, (6, 0), 6, 7, 8, 9])
    assert hits(driver, [1, 2, 3, 4, 5, (6, 0), 9, 9, 9]) == (4, 0), "the third block differs, the image reaches into it"
    driver = cached([*range(9), (6, 0), 6, 7, 8, 9], chunk_multiple=8)
    assert hits(driver, [*range(9), (6, 0), 6, 7, 8, 9, 9]) == (16, 1)
    assert hits(driver, [*range(9), (6, 0), 9, 9]) == (8, 0), "a cut point of the model"


def test_images_that_a_prefix_has_are_not_encoded_again():
    driver = cached([1, 2, (6, 0), 3, 4])
    before = len(driver.encodings)
    driver.encoded = type(driver.encoded)(16, 1)
    assert hits(driver, [1, 2, (6, 0), 3, 4]) == (8, 1)
    assert len(driver.encodings) == before
    assert hits(driver, [1, 2, (6, 0), 3, 4, (3, 4), 5]) == (8, 1)
    assert [name for name, _ in driver.encodings[before:]] == ["probe2"]


def test_block_digests_cover_contents_and_place():
    root, tokens = root_digest(0), [P] * 4
    keys = [
        block_digest(root, tokens),
        *(block_digest(root, tokens, [(bytes([n]) * 32, start)]) for n in (0, 1) for start in (-5, 0, 1)),
        block_digest(root, tokens, [(b"\0" * 32, 0), (b"\1" * 32, 2)]),
        block_digest(root, tokens, [(b"\1" * 32, 0), (b"\0" * 32, 2)]),
    ]
    assert len(set(keys)) == len(keys)
    images = make_sequence(shown("a", [1, (6, 0), 2, (2, 1), 3]), 0, ()).images
    (first, second) = (image.digest for image in images)
    assert images_within(images, 0, 4) == [(first, 1)]
    assert images_within(images, 4, 8) == [(first, -3)]
    assert images_within(images, 6, 9) == [(first, -5), (second, 2)]
    assert images_within(images, 7, 8) == images_within(images, 10, 14) == []


def test_every_byte_of_what_came_before_and_of_an_images_digest_counts():
    """A key of a few bits would show one request another one's image."""
    root, tokens, contents = root_digest(0), [P] * 4, bytes(range(32))

    def flipped(digest: bytes, place: int) -> bytes:
        return digest[:place] + bytes([digest[place] ^ 1]) + digest[place + 1 :]

    keys = [block_digest(root, tokens, [(contents, 0)])]
    keys += [block_digest(root, tokens, [(flipped(contents, place), 0)]) for place in range(len(contents))]
    keys += [block_digest(flipped(root, place), tokens, [(contents, 0)]) for place in range(len(root))]
    assert len(set(keys)) == len(keys) == 65
    assert {len(key) for key in keys} == {32}


def random_parts(random: Random) -> list:
    return [random.choice([0, 1, (2, 0), (2, 1), (3, 2)]) for _ in range(random.randint(1, 8))]


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1, 2, 3, 4]))
def test_blocks_join_exactly_where_tokens_and_images_up_to_their_end_are_equal(seed, size):
    random = Random(seed)
    parts = random_parts(random)
    other = random_parts(random) if random.random() < 0.3 else [*parts[: random.randint(0, len(parts))], *random_parts(random)]
    one, two = shown("one", parts), shown("two", other)
    tree = PrefixTree(size)
    for index in range(min(len(one.prompt), len(two.prompt)) // size):
        digests = [tree.digest(make_sequence(message, 0, ()), index) for message in (one, two)]
        # Contents and places: a piece of an image is the same only when the image is.
        alike = whole(one, (index + 1) * size) == whole(two, (index + 1) * size)
        assert (digests[0] == digests[1]) == alike


def whole(message, end: int) -> tuple:
    """All that the positions below `end` show: tokens with codes for images, and which images these are of."""
    return rendered(message)[:end], [(image.start, image.digest) for image in message.images if image.start < end]
