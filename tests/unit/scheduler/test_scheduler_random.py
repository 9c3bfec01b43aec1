"""Random request mixes: laws that hold whatever is asked, aborted, discarded or failing, at any pipeline depth."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from driver import Driver, limits, picture, random_prompt, request
from fake_device import PLACEHOLDER, rendered, run_alone, run_looped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ep_runtime.scheduler.core import Plan
from protocol.commands import Loops
from tests.support.python_path import python_path


def random_limits(random: Random):
    block_size = random.choice([1, 2, 4, 5])
    slots = random.randint(1, 6)
    multiple = random.choice([1, 1, 1, 2, 4])
    max_model_len = random.randint(12, 48)
    # From a pool that the longest request cannot fit to one for three of them.
    num_blocks = max(2, int(max_model_len / block_size * random.choice([0.7, 1, 1.3, 2, 3])))
    return limits(
        max_slots=slots,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_batch_tokens=slots + multiple - 1 + random.choice([0, 0, 1, 3, 10, 40]),
        chunk_multiple=multiple,
        prefix_cache=random.random() < 0.6,
        single_chunk=random.random() < 0.15,
        eos_token_ids=tuple(random.sample(range(50), random.choice([0, 1, 4]))),
        max_queue=random.choice([2, 1000, 1000]),
        max_scored_rows=multiple + random.choice([0, 3, 1000]),
        max_image_tokens=random.choice([5, 9, 9, 20]),
        max_loops=random.choice([1, 4, 4]),
        owners=random.choice([1, 1, 2, 3]),
    )


def random_images(random: Random, prompt: list[int], positions: int) -> tuple[list[int], list]:
    """A prompt of at most `positions` tokens, and the images that this one shows: of few contents, in any places, in a row too."""
    text = [token if token != PLACEHOLDER else 0 for token in prompt]
    images, out = [], text[:0]
    for _ in range(random.choice([0, 0, 1, 1, 2, 3])):
        contents = random.randrange(4)
        rows = 1 + (contents * 5 + 2) % 7
        cut = random.randint(0, len(text))
        if len(out) + cut + rows < positions - 1:
            out, text = [*out, *text[:cut]], text[cut:]
            images.append(picture(len(out), rows, contents))
            out = [*out, *[PLACEHOLDER] * rows]
    return [*out, *text][:positions], images


def random_loops(random: Random, most: int) -> Loops | None:
    """Of a request to a model that runs its core `most` times."""
    loops = random.choice([None, None, 1, *range(2, most + 1)])
    if loops is None:
        return None
    return Loops(loops, [0.5] * random.choice([0, loops - 1, loops - 1]))


def random_messages(random: Random, number: int, positions: int, max_loops: int = 1) -> list:
    """One HTTP request: n sequences of one group, nearly always of at most `positions` tokens; some are replayed."""
    common = [7] * random.choice([0, 0, 6, 13])
    prompt, images = random_images(random, common + random_prompt(random, 14, random.choice([2, 50])), positions)
    max_tokens = min(random.choice([0, 1, 2, 5, 9, 20, 40]), positions - len(prompt) + 2 * (random.random() < 0.05))
    sampling = {
        "stop_token_ids": random.sample(range(50), random.choice([0, 0, 3])),
        "ignore_eos": random.random() < 0.3,
        "min_tokens": random.choice([0, 0, 3]),
        "prompt_logprobs": random.choice([None, None, None, 1]),
        "grammar": random.random() < 0.25,
        "loops": random_loops(random, max_loops),
    }
    generated, depths, loops = [], [], sampling["loops"]
    if random.random() < 0.2 and max_tokens > 1:
        # Stops of any kind are left out, so the replayed beginning is one that did not end.
        sampling |= {"ignore_eos": True, "stop_token_ids": []}
        shown = rendered(request("", prompt, images=images))
        known = random.randint(1, max_tokens - 1)
        generated = run_alone(shown, max_tokens, frozenset())[0][:known]
        if loops is not None and loops.most > 1:
            depths = [0] + [random.randint(1 if loops.thresholds else loops.most, loops.most) for _ in range(known - 1)]
            generated = run_looped(shown, depths)
    count = random.choice([1, 1, 1, 2, 4])
    return [
        request(
            f"{number}.{i}",
            list(prompt),
            max_tokens,
            group=str(number),
            priority=random.choice([0, 0, 0, -1, 3]),
            generated=list(generated),
            depths=list(depths),
            images=images,
            adapter=number % 2,
            suspicions=random.choice([0, 0, 0, 0, 1, 2, 3]),
            **sampling,
        )
        for i in range(count)
    ]


def drive(seed: int, *, requests: int, aborts: float, discards: float, evil: float, unfit: float = 0.0) -> Driver:
    random = Random(seed)
    bound = random_limits(random)
    positions = min(bound.max_model_len, bound.num_blocks * bound.block_size)
    if bound.single_chunk:
        positions = min(positions, bound.max_batch_tokens)
    pending = [message for n in range(requests) for message in random_messages(random, n, positions, bound.max_loops)]
    named = frozenset(message.request_id for message in pending if random.random() < evil)
    digests = sorted({image.digest for message in pending for image in message.images})
    driver = Driver(
        bound,
        depth=random.randint(0, 2),
        evil=named,
        cache_rows=bound.max_image_tokens * random.choice([1, 1, 2, 5]),
        unfit=frozenset(digest for digest in digests if random.random() < unfit),
    )
    slow = random.choice([0.1, 0.5, 1.0])
    pending.reverse()
    for _ in range(20_000):
        while pending and random.random() < 0.4:
            driver.submit(pending.pop())
        if random.random() < aborts:
            driver.abort(*random.sample(sorted(driver.messages), min(2, len(driver.messages))))
        if random.random() < slow:
            driver.encode()
        plan = driver.plan()
        if plan is not None:
            if random.random() < aborts:
                driver.abort(random.choice(sorted(driver.messages)))
            if driver.queue and random.random() < 0.2:
                driver.read()
            if random.random() < discards:
                driver.discard(plan, half_sent=random.random() < 0.5)
            else:
                driver.launch(plan)
        while driver.queue and (len(driver.queue) > driver.depth or plan is None or random.random() < 0.1):
            driver.read()
        if random.random() < 0.3 or (plan is None and not driver.queue):
            for request_id in random.sample(sorted(driver.owed), random.randint(0, len(driver.owed))):
                driver.give_mask(request_id)
        if not pending and driver.scheduler.idle:
            break
    assert driver.scheduler.idle, "starvation: the mix does not come to its end"
    driver.check_end()
    driver.check_answers()
    return driver


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), aborts=st.sampled_from([0.0, 0.05, 0.4]), discards=st.sampled_from([0.0, 0.1, 0.6]))
def test_any_mix_ends_with_right_answers_and_no_leak(seed, aborts, discards):
    drive(seed, requests=10, aborts=aborts, discards=discards, evil=0.0)


@pytest.mark.parametrize("seed", range(30))
def test_long_mixes(seed):
    driver = drive(1000 + seed, requests=60, aborts=0.03, discards=0.05, evil=0.0)
    assert len(driver.messages) > 60


@pytest.mark.parametrize("seed", range(60))
def test_failing_requests_end_alone_and_spare_the_others(seed):
    driver = drive(seed, requests=12, aborts=0.0, discards=0.1, evil=0.1)
    for request_id, answer in driver.answers.items():
        served = answer.final.status not in (400, 429)
        if served and not driver.messages[request_id].generated:
            assert (answer.final.finish == "error") == (request_id in driver.device.evil)


@pytest.mark.parametrize("seed", range(40))
def test_an_image_that_cannot_be_encoded_ends_those_who_show_it_alone(seed):
    driver = drive(seed, requests=12, aborts=0.0, discards=0.1, evil=0.0, unfit=0.3)
    for request_id, answer in driver.answers.items():
        message = driver.messages[request_id]
        if answer.final.status not in (400, 429) and not message.generated:
            unfit = driver.unfit.intersection(image.digest for image in message.images)
            assert (answer.final.finish == "error") == bool(unfit)


def plans_of(depth: int, owners: int = 1) -> list[Plan]:
    """All plans of one mix, with prefix hits, preemptions and evictions."""
    random = Random(depth)
    bound = limits(num_blocks=12, prefix_cache=True, max_image_tokens=9, max_loops=3, owners=owners)
    driver = Driver(bound, depth=depth)
    for number in range(30):
        for message in random_messages(random, number, 40, 3):
            driver.submit(message)
    driver.run()
    return driver.plans


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_plans_are_a_function_of_the_calls(depth):
    assert plans_of(depth) == plans_of(depth)


@pytest.mark.parametrize("owners", [1, 3])
def test_plans_are_the_same_in_another_process(owners):
    """Where hashes of texts are others, and objects lie elsewhere: no order of a plan follows from either."""
    program = f"from test_scheduler_random import plans_of\nfor plan in plans_of(1, {owners}): print(plan)"
    path = python_path(Path(__file__).parent)
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert found == {"".join(f"{plan}\n" for plan in plans_of(1, owners))}
