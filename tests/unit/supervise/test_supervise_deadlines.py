"""Who is judged not to move, who is behind, and how the coordinator's own lateness is taken out of it."""

import pytest

from ep_runtime.supervise.deadlines import PHASE_ORDER, Lateness, Watch
from protocol.messages import Progress
from protocol.progress import Phase

BOUND = 10.0


def at(rank: int, step: int, phase: str, collectives: int = 0, moves: int = 1, epoch: int = 5, command: str = "DECODE") -> Progress:
    return Progress(
        rank=rank, epoch=epoch, step=step, command=command, phase=phase, collectives=collectives, moves=moves, idle_s=1.25
    )


def watching(*places: Progress, time: float = 100.0) -> Watch:
    watch = Watch(len(places))
    watch.begin(5, time)
    for place in places:
        see(watch, place, time)
    return watch


def see(watch: Watch, place: Progress, time: float) -> None:
    watch.heard(place.rank, time)
    watch.note(place.rank, place, time)


def test_every_phase_has_its_place_in_the_order():
    assert sorted(PHASE_ORDER) == sorted(Phase)


@pytest.mark.parametrize(
    ("places", "behind"),
    [
        ([at(0, 7, "ACKNOWLEDGING"), at(1, 6, "WAITING"), at(2, 7, "WAITING")], [1]),
        ([at(0, 7, "ACKNOWLEDGING"), at(1, 7, "PREPARING"), at(2, 7, "EXECUTING")], [1]),
        ([at(0, 7, "EXECUTING", 4), at(1, 7, "EXECUTING", 4), at(2, 7, "EXECUTING", 3)], [2]),
        ([at(0, 7, "READING"), at(1, 7, "EXECUTING", 9), at(2, 7, "EXECUTING", 9)], [1, 2]),
        ([at(0, 7, "EXECUTING"), at(1, 7, "WAITING"), at(2, 7, "WAITING")], [0]),
        ([at(0, 7, "WAITING"), at(1, 7, "WAITING"), at(2, 7, "WAITING")], [0]),
        ([at(0, 7, "EXECUTING", 2), at(1, 7, "EXECUTING", 2), at(2, 7, "EXECUTING", 2)], []),
        ([at(0, 7, "EXECUTING", 2), at(1, 7, "no such phase"), at(2, 7, "EXECUTING", 2)], [1]),
    ],
)
def test_the_rank_behind_is_the_least_far(places, behind):
    assert watching(*places).behind() == behind


def test_a_rank_that_was_never_seen_is_behind():
    watch = Watch(2)
    watch.begin(5, 0.0)
    see(watch, at(0, 0, "CONNECTING"), 1.0)
    assert watch.behind() == [1]


def test_a_rank_that_does_not_move_is_named_with_where_all_are():
    watch = watching(at(0, 7, "ACKNOWLEDGING", 3), at(1, 7, "EXECUTING", 2, command="MIXED"))
    for time in range(101, 112):
        see(watch, at(0, 7, "ACKNOWLEDGING", 3, moves=time), time)
        see(watch, at(1, 7, "EXECUTING", 2, command="MIXED"), time)
        assert (watch.judge(BOUND) is None) == (time <= 110)
    assert str(watch.judge(BOUND)) == (
        "EpDeadline: rank 1 did not move for 10 s; behind: rank 1; rank 0: step 7 DECODE, acknowledging, 3 collectives, "
        "still for 1.2 s; rank 1: step 7 MIXED, executing, 2 collectives, still for 1.2 s"
    )


@pytest.mark.parametrize("stuck", [0, 1, 2, 3])
def test_of_four_ranks_each_is_named_that_does_not_move_or_is_silent(stuck):
    watch = watching(*(at(rank, 7, "EXECUTING") for rank in range(4)))
    for rank in range(4):
        see(watch, at(rank, 7, "EXECUTING", moves=1 if rank == stuck else 2), 105)
        if rank != stuck:
            watch.heard(rank, 115.5)
    assert watch.silent(115.5, BOUND) == [stuck]
    assert watch.judge(20.0) is None
    see(watch, at(stuck, 7, "EXECUTING"), 116)
    assert watch.silent(116, BOUND) == []
    for rank in {0, 1, 2, 3} - {stuck}:
        see(watch, at(rank, 7, "EXECUTING", moves=3), 116)
    assert str(watch.judge(BOUND)).startswith(f"EpDeadline: rank {stuck} did not move for 10 s; ")


def test_moves_of_others_do_not_refresh_a_stuck_rank_and_a_long_command_that_moves_is_stuck_too():
    watch = watching(at(0, 7, "EXECUTING"), at(1, 7, "EXECUTING"))
    for time in range(101, 112):
        for rank in (0, 1):
            see(watch, at(rank, 7, "EXECUTING", collectives=time, moves=time), time)
    assert str(watch.judge(BOUND)).startswith("EpDeadline: the head's command takes longer than 10 s; ")
    see(watch, at(0, 8, "EXECUTING", moves=200), 112)
    see(watch, at(1, 8, "EXECUTING", moves=200), 112)
    assert watch.judge(BOUND) is None


def test_a_head_that_waits_for_requests_is_in_no_command():
    watch = watching(at(0, 7, "WAITING"))
    for time in range(101, 130):
        see(watch, at(0, 7, "WAITING", moves=time), time)
        assert watch.judge(BOUND) is None


def test_a_silent_supervisor_is_no_engine_that_stands_still():
    watch = watching(at(0, 7, "WAITING"), at(1, 7, "EXECUTING"))
    see(watch, at(0, 8, "WAITING", moves=2), 110.5)
    assert watch.silent(110.5, BOUND) == [1]
    assert watch.judge(BOUND) is None


def test_a_page_of_another_epoch_is_a_sign_of_life_and_no_move():
    watch = watching(at(0, 7, "WAITING"))
    for time in range(101, 112):
        see(watch, at(0, 900 + time, "EXECUTING", moves=time, epoch=4), time)
    assert watch.silent(112, BOUND) == []
    assert "step 7" in str(watch.judge(BOUND))


def test_a_new_epoch_starts_afresh():
    watch = watching(at(0, 7, "EXECUTING"))
    watch.heard(0, 111)
    assert watch.judge(BOUND) is not None
    watch.begin(6, 111)
    assert watch.judge(BOUND) is None
    assert watch.describe() == "behind: rank 0; rank 0: no progress seen"


def test_time_in_which_the_coordinator_itself_stood_still_does_not_count():
    lateness = Lateness(100.0)
    lateness.tick(100.0, 0.25)
    assert lateness.at(100.2) == 0
    lateness.tick(100.25, 0.25)
    # stopped for a minute: from when the tick was due, time stands still, whatever comes first afterwards
    assert lateness.at(160.5) == 60.0
    assert lateness.at(160.5) == 60.0
    lateness.tick(161.0, 0.25)
    assert lateness.at(161.125) == 60.5
    times = [100.0, 100.4, 103.0, 103.0, 104.0]
    lateness = Lateness(100.0)
    fair = []
    for time in times:
        fair.append(time - lateness.at(time))
        if time == 103.0:
            lateness.tick(time, 0.25)
    assert fair == sorted(fair)
