"""Sequences divided among owners: where each goes, and that what one owner lacks is nobody else's matter."""

from __future__ import annotations

from random import Random

import pytest
from driver import Driver, limits, random_prompt, request

from ep_runtime.scheduler.core import SchedulerError, SeqState, Sequence
from ep_runtime.scheduler.owner import SEQUENCE_ROWS, Owner, Place, choose
from ep_runtime.scheduler.running import RunningSet
from ep_runtime.scheduler.slots import SlotPool
from protocol.messages import SamplingParams


def shared(owners: int = 2, **changes) -> Driver:
    return Driver(limits(owners=owners, max_batch_tokens=64, **changes), depth=1)


def owners_of(driver: Driver) -> list[int]:
    """Of all admissions, in their order."""
    return [alloc.owner for plan in driver.plans for alloc in plan.allocs]


def test_slots_of_owners_are_numbered_in_turn():
    pools = [SlotPool(5, number, 3) for number in range(3)]
    assert [[pool.take() for _ in range(pool.free)] for pool in pools] == [[0, 3], [1, 4], [2]]
    with pytest.raises(KeyError):
        pools[0].drain(1)
    pools[1].drain(4)
    pools[1].release(4)
    assert (pools[1].free, pools[1].take()) == (1, 4)
    for pool in pools:
        pool.check_integrity()


def owner(number: int, *, running: int = 0, taken: int = 0, busy: int = 0) -> Owner:
    made = Owner(number, limits(owners=4, max_slots=8, num_blocks=20))
    for _ in range(busy):
        made.slots.take()
    made.running = running
    for _ in range(taken):
        made.blocks.take()
    return made


def known(made: Owner, count: int) -> list[int]:
    """Blocks whose contents are known there, that nobody holds."""
    blocks = [made.blocks.take() for _ in range(count)]
    for block in blocks:
        made.blocks.mark_cached(block)
    made.blocks.release(blocks)
    return blocks


@pytest.mark.parametrize(
    ("described", "chosen"),
    [
        ([{}, {}], 0),
        ([{"running": 2}, {"running": 1}, {"running": 2}], 1),
        ([{"running": 1, "taken": 3}, {"running": 1, "taken": 2}], 1),
        ([{"taken": 18}, {"running": 3}], 1),
        ([{"busy": 2}, {"running": 3}], 1),
        # None admits it now: it waits where it should start.
        ([{"running": 1, "taken": 19}, {"taken": 18}], 1),
    ],
    ids=["alike", "fewest running", "most blocks", "no blocks", "no slots", "nowhere"],
)
def test_a_sequence_goes_where_it_fits_and_fewest_run(described, chosen):
    places = [Place(owner(number, **one), []) for number, one in enumerate(described)]
    assert choose(places, 5, 4).owner.number == chosen


@pytest.mark.parametrize(("size", "running", "chosen"), [(4, 0, 1), (4, 1, 0), (SEQUENCE_ROWS, 1, 1), (SEQUENCE_ROWS // 2, 2, 0)])
def test_a_known_prefix_is_weighed_against_company(size, running, chosen):
    """Its two blocks are worth as much as one sequence more for each SEQUENCE_ROWS of their positions."""
    first, second = owner(0), owner(1, running=running)
    places = [Place(first, []), Place(second, known(second, 2))]
    if chosen == 1:
        second.blocks.take()
    assert choose(places, 5, size).owner.number == chosen


def test_a_prefix_is_hit_by_who_goes_to_its_owner_alone():
    driver = shared(prefix_cache=True)
    prompt = list(range(9))
    driver.submit(request("a", prompt, 1))
    driver.run()
    driver.submit(request("b", prompt, 4))
    driver.submit(request("c", prompt, 4))
    driver.run()
    # Beside b, the 8 known positions are not worth it; c computes them anew, and knows them then.
    assert owners_of(driver) == [0, 0, 1]
    assert [driver.answers[name].cached for name in "abc"] == [0, 8, 0]
    driver.submit(request("d", prompt, 4))
    driver.submit(request("e", prompt, 4))
    driver.run()
    assert [driver.answers[name].cached for name in "de"] == [8, 8]
    assert owners_of(driver)[3:] == [0, 1]
    driver.check_answers()


def test_who_lacks_a_block_preempts_its_own_owners_last():
    running = RunningSet()
    for arrival, number in enumerate((0, 1, 0, 1, 1)):
        seq = Sequence(
            request_id=str(arrival),
            group="",
            prompt_len=1,
            tokens=[1],
            sampling=SamplingParams(seed=0, max_tokens=1),
            arrival=arrival,
            owner=number,
            state=SeqState.RUNNING,
        )
        running.add(seq)
    assert [running.last(number).arrival for number in (0, 1)] == [2, 4]


def test_an_owner_without_blocks_leaves_the_others_running():
    """Owner 0 has two that grow past its blocks: the later one of them goes, and not the one of owner 1 that came last of all."""
    driver = shared(num_blocks=8, max_slots=4, max_model_len=32)
    for name, length in (("first", 24), ("other", 2), ("second", 24), ("last", 24)):
        driver.submit(request(name, [1] * 4, length))
    driver.run()
    admitted = [(alloc.request_id, alloc.owner) for plan in driver.plans for alloc in plan.allocs]
    assert admitted[:4] == [("first", 0), ("other", 1), ("second", 0), ("last", 1)]
    assert [name for name, _ in admitted[4:]] == ["second"]
    assert driver.scheduler.stats().preemptions == 1
    driver.check_answers()


def test_what_fits_into_no_owner_is_refused_though_all_together_could_hold_it():
    driver = shared(num_blocks=8, max_model_len=64)
    refusal = driver.submit(request("long", [1] * 30, 4))
    assert refusal is not None
    assert refusal.status == 400
    assert "the cache has 8" in (refusal.error or "")
    assert driver.submit(request("fits", [1] * 30, 3)) is None
    driver.run()
    driver.check_answers()


@pytest.mark.parametrize("seed", range(12))
def test_a_block_serves_the_sequences_of_one_owner(seed):
    """After every plan: what sequences hold of an owner's blocks is what its own pool counts, and all slots are their owners'."""
    random = Random(seed)
    driver = shared(random.randint(2, 4), num_blocks=14, max_slots=7, max_model_len=40, prefix_cache=True)
    life = driver.scheduler._life
    for number in range(40):
        prompt = [7] * random.choice([0, 8, 16]) + random_prompt(random, 12, 3)
        driver.submit(request(str(number), prompt, random.randint(1, 40 - len(prompt))))
    while driver.step():
        for one in life.owners:
            held = [seq for seq in life.holders() if seq.owner == one.number]
            assert all(seq.slot % len(life.owners) == one.number for seq in held)
            blocks = {block for seq in held for block in seq.blocks}
            assert all(one.blocks.references(block) == sum(block in seq.blocks for seq in held) for block in range(14))
            assert len(blocks) + one.blocks.available == one.blocks.total
    driver.check_end()
    driver.check_answers()
    assert set(owners_of(driver)) == set(range(len(life.owners)))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda owner, seq: setattr(owner, "running", 2), "books say 2"),
        (lambda owner, seq: setattr(owner, "draining", 1), "1 drain"),
        (lambda owner, seq: setattr(seq, "owner", 1), "reference counts|its sequence says"),
    ],
)
def test_integrity_checks_see_a_sequence_of_another_owner(damage, named):
    driver = shared()
    driver.submit(request("a", [1, 2, 3], 4))
    driver.step()
    (seq,) = driver.scheduler._life.holders()
    damage(driver.owner(), seq)
    with pytest.raises(SchedulerError, match=named):
        driver.scheduler.check_integrity()
