"""The owners of slots, blocks and the queue, each alone; and that their integrity checks see damage."""

from __future__ import annotations

from random import Random

import pytest
from driver import Driver, limits, request

from ep_runtime.scheduler.blocks import BlockPool
from ep_runtime.scheduler.core import SchedulerError, SeqState, Sequence
from ep_runtime.scheduler.queue import WaitingQueue
from ep_runtime.scheduler.slots import SlotPool, SlotState
from protocol.messages import SamplingParams


def test_slots_move_only_along_their_states():
    pool = SlotPool(3)
    assert [pool.take(), pool.take(), pool.take()] == [0, 1, 2]
    with pytest.raises(SchedulerError, match="no slot"):
        pool.take()
    pool.drain(2)
    pool.drain(0)
    assert pool.free == 0
    with pytest.raises(SchedulerError, match="slot 1 is ACTIVE, not DRAINING"):
        pool.release(1)
    pool.release(2)
    pool.release(0)
    with pytest.raises(SchedulerError, match="slot 0 is EMPTY"):
        pool.drain(0)
    assert pool.take() == 0
    assert pool.state(2) is SlotState.EMPTY
    pool.check_integrity()


def test_cached_blocks_are_evicted_in_the_order_of_their_release_children_first():
    evicted: list[int] = []
    pool = BlockPool(4, evicted.append)
    first, second = [pool.take(), pool.take()], [pool.take()]
    for block in first + second:
        pool.mark_cached(block)
    pool.release(second)
    pool.release(first)
    assert pool.available == 4
    taken = [pool.take() for _ in range(4)]
    assert taken == [3, 2, 1, 0]
    assert evicted == [2, 1, 0]
    with pytest.raises(SchedulerError, match="no block"):
        pool.take()


def test_a_shared_block_returns_with_its_last_holder():
    pool = BlockPool(2, lambda block: None)
    block = pool.take()
    pool.mark_cached(block)
    pool.share(block)
    pool.release([block])
    assert pool.available == 1
    pool.check_integrity([[block]])
    pool.release([block])
    assert (pool.available, pool.unreferenced([block])) == (2, 1)
    with pytest.raises(SchedulerError, match="not held"):
        pool.release([block])
    with pytest.raises(SchedulerError, match="neither held nor evictable"):
        pool.share(1 - block)


def sequence(arrival: int, priority: int = 0) -> Sequence:
    sampling = SamplingParams(seed=0, max_tokens=1)
    return Sequence(
        request_id=str(arrival), group="", prompt_len=1, tokens=[1], sampling=sampling, arrival=arrival, priority=priority
    )


def test_the_queues_lanes_against_sorted_lists():
    random = Random(1)
    queue, model = WaitingQueue(), []
    for arrival in range(3000):
        if model and random.random() < 0.48:
            seq = model.pop(0 if random.random() < 0.5 else random.randrange(len(model)))
            queue.remove(seq)
        else:
            seq = sequence(arrival, random.randrange(3))
            seq.failures = random.choice([0, 0, 1, 2, 5])
            queue.push(seq)
            model.append(seq)
            model.sort(key=lambda seq: seq.key)
        for alone in (False, True):
            lane = [seq for seq in model if (seq.failures >= 2) == alone]
            assert queue.peek(alone=alone) is (lane[0] if lane else None)
        assert len(queue) == len(model)
        if arrival % 100 == 0:
            queue.check_integrity()
    with pytest.raises(SchedulerError, match="not queued"):
        queue.remove(sequence(5000))


def damage_reference(driver: Driver) -> None:
    driver.owner().blocks._references[0] += 1


def damage_free_list(driver: Driver) -> None:
    driver.owner().blocks._free.pop()


def damage_slot(driver: Driver) -> None:
    driver.owner().slots._states[3] = SlotState.ACTIVE


def damage_flight(driver: Driver) -> None:
    driver.scheduler._live["a"].in_flight += 1


def damage_tree(driver: Driver) -> None:
    driver.owner().tree._digests.popitem()


def damage_state(driver: Driver) -> None:
    driver.scheduler._live["a"].state = SeqState.DRAINING


def damage_live(driver: Driver) -> None:
    del driver.scheduler._live["waiting"]


def damage_queue(driver: Driver) -> None:
    driver.scheduler._life.queue._lanes[False].clear()


@pytest.mark.parametrize(
    "damage",
    [
        damage_reference,
        damage_free_list,
        damage_slot,
        damage_flight,
        damage_tree,
        damage_state,
        damage_live,
        damage_queue,
    ],
)
def test_integrity_checks_see_damage(damage):
    driver = Driver(limits(prefix_cache=True, max_batch_tokens=64, num_blocks=10), depth=1)
    driver.submit(request("a", [1] * 9, 20))
    driver.step()
    driver.step()
    driver.submit(request("waiting", [2] * 30, 4))
    driver.scheduler.check_integrity()
    damage(driver)
    with pytest.raises(SchedulerError):
        driver.scheduler.check_integrity()
