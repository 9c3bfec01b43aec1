"""The membership in a simulated world where everything fails at random moments: what must hold holds, and it never gets stuck."""

import random

import pytest

from ep_runtime.supervise.epoch_record import Phase
from ep_runtime.supervise.events import Limits, StopAsked
from tests.support.supervise_judge import Judge
from tests.support.supervise_world import World

SETTLE_SECONDS = 400.0
"""Longer than every deadline below, one after another."""


def limits(**changes: float) -> Limits:
    usual = {"rendezvous": 60, "load": 30, "handshake": 4, "warm": 6, "command": 3, "drain": 5}
    return Limits(**{**usual, "failed_starts": 1000, "recoveries": 1000, **changes})  # type: ignore[arg-type]


def settled(world: World) -> bool:
    return world.machine.phase is Phase.RUNNING and world.machine.frontend.alive


@pytest.mark.parametrize("seed", range(200))
def test_after_any_faults_an_epoch_runs_again(seed: int) -> None:
    chance = random.Random(seed)
    size = 1 + seed % 4
    judge = Judge(size, limits())
    world = World(seed, size, limits(), judge)
    for _ in range(chance.randrange(1, 25)):
        world.run(world.time + chance.choice((0.0, 0.05, 0.5, 3.0, 12.0)))
        world.fault()
        world.late += chance.choice((0.0, 0.0, 0.1))
    world.run(world.time + SETTLE_SECONDS, lambda: settled(world))
    assert not world.over, world.over
    assert settled(world)
    calm = world.time + 60
    world.run(calm)
    world.run(calm + SETTLE_SECONDS, lambda: settled(world))  # what was under way when it had settled
    epoch = world.machine.epoch.number
    world.run(world.time + 60)
    assert settled(world)
    assert world.machine.epoch.number == epoch, "epochs end without a fault"
    assert judge.recovered in (0, epoch)


@pytest.mark.parametrize("seed", range(60))
def test_a_stop_at_any_moment_ends_everything_with_status_0(seed: int) -> None:
    chance = random.Random(seed)
    size = 1 + seed % 4
    world = World(seed, size, limits(), Judge(size, limits()))
    for _ in range(chance.randrange(8)):
        world.run(world.time + chance.choice((0.05, 0.5, 3.0)))
        world.fault()
    world.notify(StopAsked("SIGTERM"))
    world.run(world.time + SETTLE_SECONDS)
    assert world.over is not None
    # A rank behind a cut cable, which nobody has noticed yet, cannot be told to end; and a fault may have crossed with the stop.
    unreachable = [rank for rank, link in world.members.items() if not link.alive]
    crossed = world.over.cause.endswith(("its engine ended", "ranks differ"))
    assert world.over.status == 0 or crossed or (unreachable and "not ended after 8 s: rank" in world.over.cause), world.over


@pytest.mark.parametrize("seed", range(60))
def test_limits_end_the_server_and_nothing_goes_on_beyond_them(seed: int) -> None:
    chance = random.Random(seed)
    size = 1 + seed % 4
    few = limits(failed_starts=chance.randrange(1, 4), recoveries=chance.randrange(1, 6))
    judge = Judge(size, few)
    world = World(seed, size, few, judge)
    for _ in range(200):
        world.run(world.time + chance.choice((0.05, 0.5, 3.0)))
        world.fault()
    world.run(world.time + SETTLE_SECONDS)
    assert world.over is not None, "200 faults and no limit was met"
    assert world.over.status == 1
    assert any(words in world.over.cause for words in ("in a row", "within an hour", "load:", "rendezvous:")), world.over
