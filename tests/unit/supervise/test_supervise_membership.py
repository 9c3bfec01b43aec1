"""The membership state machine, event by event."""

import pytest

from ep_runtime.supervise.events import (
    Announce,
    Drop,
    Joined,
    Left,
    Send,
    StartFrontend,
    TellFrontend,
)
from ep_runtime.supervise.evidence import ENGINE_EXITED, ENGINE_KILLED, SUPERVISOR_GONE, Evidence, root_cause
from ep_runtime.supervise.ranks import State
from protocol.messages import (
    BeginEpoch,
    EndEpoch,
    EpochEnded,
    EpochLeft,
    KillEngine,
    Loaded,
    OpenEpoch,
    Ready,
    Recovered,
    Refused,
    Report,
)
from tests.support.membership_driver import KILLED, Server, crashed, join, killed, lost, opened

# The start


def test_the_ordered_start_sends_each_message_once_and_in_order():
    server = Server(2)
    assert server.actions == [StartFrontend()]
    assert server.on(Joined(1, "b")) == []
    assert server.on(Joined(0, "a")) == []
    assert server.hear(0, Loaded(rank=0)) == []
    assert server.hear(1, Loaded(rank=1)) == [Send(0, OpenEpoch(epoch=1, world=2))]
    begin = BeginEpoch(epoch=1, world=2, store="host:1", links="unix:/x")
    assert server.hear(0, opened(1)) == [Send(0, begin), Send(1, begin)]
    assert server.hear(1, Ready(epoch=1, rank=1)) == []
    assert server.hear(0, Ready(epoch=1, rank=0)) == [Announce("epoch 1 runs on 2 ranks")]


def test_a_rank_may_load_before_the_others_have_joined():
    server = Server(2)
    server.on(Joined(0, "a"))
    assert server.hear(0, Loaded(rank=0)) == []
    server.on(Joined(1, "b"))
    assert server.hear(1, Loaded(rank=1)) == [Send(0, OpenEpoch(epoch=1, world=2))]


def test_admission():
    server = Server(3)
    admit = server.state.admit
    assert admit(join(None), local=True) == 0
    for outside in (0, 3):
        assert admit(join(outside), local=False) == Refused(f"rank {outside} is outside the ranks 1 to 2 that may join")
    assert admit(join(2, "second"), local=False) == 2
    server.on(Joined(2, "second"))
    assert admit(join(2, "other"), local=False) == Refused("rank 2 has joined already", again=True)
    assert admit(join(None, "other"), local=False) == 1
    server.on(Joined(1, "other"))
    assert admit(join(None, "third"), local=False) == Refused("all 3 ranks have joined", again=True)


def test_a_supervisor_gets_its_rank_back_whether_or_not_its_old_connection_is_known_to_have_ended():
    server = Server(3).run()
    assert server.state.admit(join(None, "boot 2"), local=False) == 2
    server.on(Left(2))
    assert server.state.admit(join(None, "boot 2"), local=False) == 2
    assert server.state.admit(join(None, "another"), local=False) == 2
    server.on(Joined(2, "another"))
    assert server.state.admit(join(None, "boot 2"), local=False) == Refused("all 3 ranks have joined", again=True)


def test_a_daemon_is_admitted_in_the_place_of_one_that_left_and_the_next_epoch_follows():
    server = Server(2).run()
    server.on(Left(1))
    assert server.told() == [EpochEnded(epoch=1, reason="rank 1: its supervisor is gone", final=False)]
    assert server.sent() == [(0, EndEpoch(epoch=1, reason="rank 1: its supervisor is gone"))]
    server.leave(1, 0)
    server.on(Joined(1, "new"), after=100)
    assert server.hear(1, Loaded(rank=1), after=5) == [Send(0, OpenEpoch(epoch=2, world=2))]
    server.form(2)


# Failure and recovery


def test_a_killed_engine_ends_the_epoch_and_the_next_one_begins_when_it_has_loaded_again():
    server = Server(2).run()
    cause = f"rank 1: {KILLED}"
    assert server.hear(1, killed(1)) == [
        TellFrontend(EpochEnded(epoch=1, reason=cause, final=False)),
        Send(0, EndEpoch(epoch=1, reason=cause)),
        Send(1, EndEpoch(epoch=1, reason=cause)),  # for what was under way when it died, and may reach its successor
    ]
    assert server.hear(0, EpochLeft(epoch=1, rank=0), after=0.25) == [
        Announce(f"epoch 1 ended: {cause}", failure=True),
        TellFrontend(EpochEnded(epoch=1, reason=cause, final=False)),
    ]
    loaded = Loaded(rank=1, seconds={"spawn": 0.125, "import": 1.0, "load": 2.0})
    assert server.hear(1, loaded, after=3) == [Send(0, OpenEpoch(epoch=2, world=2))]
    server.hear(0, opened(2), after=0.25)
    server.hear(1, Ready(epoch=2, rank=1))
    seconds = {"leave": 0.25, "spawn": 0.125, "import": 1.0, "load": 2.0, "rendezvous": 0.75, "total": 4.0}
    line = "epoch 2 runs on 2 ranks; recovered in 4.00 s (leave 0.25, spawn 0.12, import 1.00, load 2.00, rendezvous 0.75)"
    assert server.hear(0, Ready(epoch=2, rank=0), after=0.5) == [
        TellFrontend(Recovered(epoch=2, seconds=seconds)),
        Announce(line),
    ]


def test_the_cause_is_told_when_all_have_answered_though_a_consequence_came_first():
    server = Server(3).run()
    server.hear(0, lost(0))
    assert server.told() == [EpochEnded(epoch=1, reason="rank 0: EpPeerGone: a link ended", final=False)]
    assert [rank for rank, _ in server.sent()] == [0, 1, 2]
    assert server.hear(2, lost(2)) == []
    assert server.leave(1, 0, 2) == []
    server.hear(1, killed(1, outside=False))
    assert server.told() == [EpochEnded(epoch=1, reason=f"rank 1: {KILLED}", final=False, suspicious=True)]


def test_lost_links_alone_are_suspicious_and_an_act_from_outside_is_not():
    server = Server(2).run()
    server.hear(0, lost(0))
    server.leave(1, 0, 1)
    assert server.told() == [EpochEnded(epoch=1, reason="rank 0: EpPeerGone: a link ended", final=False, suspicious=True)]
    server.form(2)
    server.hear(0, lost(0, 2))
    server.leave(2, 0)
    server.hear(1, killed(1, 2))
    assert not server.told()[-1].suspicious


@pytest.mark.parametrize("source", ["report", "answer", "death of the killed head"])
def test_the_request_that_ran_alone_is_named_wherever_it_was_learned(source):
    server = Server(2).run()
    if source == "report":
        server.hear(0, Report(rank=0, epoch=1, error="EpDiverged", message="ranks differ", alone="r"))
        server.leave(1, 0, 1)
    elif source == "answer":
        server.hear(1, crashed(1))
        server.leave(1, 0, alone="r")
    else:
        server.hear(1, crashed(1))
        server.tick(2)
        assert [type(message) for _, message in server.sent()] == [KillEngine]
        report = Report(rank=0, epoch=1, error="EpDeadline", message="its engine was killed", ended=True, alone="r")
        server.hear(0, report)
    last = server.told()[-1]
    assert (last.suspicious, last.alone) == (True, "r")


def test_nobody_is_blamed_for_an_epoch_that_was_ended_from_outside_or_had_not_begun():
    server = Server(2).run()
    server.hear(0, killed(0, alone="r"))
    server.leave(1, 1)
    assert (server.told()[-1].suspicious, server.told()[-1].alone) == (False, "")
    server.hear(0, Loaded(rank=0))
    server.hear(0, Report(rank=0, epoch=2, error="OSError", message="no port", alone="r"))
    server.leave(2, 0, 1)
    assert (server.told()[-1].epoch, server.told()[-1].suspicious, server.told()[-1].alone) == (2, False, "")


def test_an_engine_that_does_not_leave_is_killed_and_a_supervisor_that_does_not_kill_is_dropped():
    server = Server(3).run()
    server.hear(2, killed(2))
    server.leave(1, 0)
    assert server.tick(1.9) == []
    server.tick(0.2)
    assert server.lines() == ["rank 1: it has not left epoch 1 after 2 s: its engine is killed"]
    assert server.sent() == [(1, KillEngine(reason="it has not left epoch 1 after 2 s"))]
    assert server.leave(1, 1) == []  # it crossed; the engine will be killed all the same
    assert server.tick(4.9) == []
    assert server.tick(0.2) == [Drop(1, "its engine was to be killed 5 s ago")]
    server.on(Left(1))
    assert server.told() == [EpochEnded(epoch=1, reason=f"rank 2: {KILLED}", final=False)]


def test_being_killed_for_not_leaving_is_no_failed_start_and_no_cause():
    server = Server(2, failed_starts=1).run()
    server.hear(0, lost(0))
    server.leave(1, 0)
    server.tick(2)
    server.hear(1, Report(rank=1, epoch=1, error="EpDeadline", message="its engine was killed", ended=True))
    assert server.told() == [EpochEnded(epoch=1, reason="rank 0: EpPeerGone: a link ended", final=False, suspicious=True)]
    assert server.hear(1, Loaded(rank=1)) == [Send(0, OpenEpoch(epoch=2, world=2))]


def test_an_engine_that_was_gone_before_it_was_to_be_killed_is_the_cause():
    server = Server(2).run()
    server.hear(0, lost(0))
    server.leave(1, 0)
    server.tick(2)
    assert [type(message) for _, message in server.sent()] == [KillEngine]
    server.hear(1, killed(1))  # its supervisor had no time to say so
    assert server.told() == [EpochEnded(epoch=1, reason=f"rank 1: {KILLED}", final=False)]


def test_a_kill_while_a_recovery_is_under_way_is_part_of_it():
    server = Server(3).run()
    server.hear(1, killed(1))
    server.leave(1, 0)
    server.hear(2, killed(2))  # it had not answered
    assert server.told() == [EpochEnded(epoch=1, reason=f"rank 1: {KILLED}", final=False)]
    assert server.hear(0, killed(0)) == [Announce(f"between two epochs: rank 0: {KILLED}", failure=True)]
    assert server.hear(1, killed(1)) == [Announce(f"between two epochs: rank 1: {KILLED}", failure=True)]
    for rank in (2, 0):
        assert server.hear(rank, Loaded(rank=rank)) == []
    assert server.hear(1, Loaded(rank=1)) == [Send(0, OpenEpoch(epoch=2, world=3))]


@pytest.mark.parametrize("phase", ["opening", "forming"])
def test_a_kill_while_the_epoch_is_opened_or_formed(phase):
    server = Server(2).load()
    if phase == "forming":
        server.hear(0, opened(1))
        server.hear(0, Ready(epoch=1, rank=0))
    server.hear(1, killed(1))
    assert server.sent() == [(rank, EndEpoch(epoch=1, reason=f"rank 1: {KILLED}")) for rank in (0, 1)]
    if phase == "opening":
        assert server.hear(0, opened(1)) == []  # it crossed
    server.leave(1, 0)
    assert server.hear(1, Loaded(rank=1)) == [Send(0, OpenEpoch(epoch=2, world=2))]
    assert [server.state.ranks[rank].state for rank in (0, 1)] == [State.BUSY, State.IDLE]


def test_what_crossed_with_the_end_of_an_epoch_is_no_failure_of_the_next():
    server = Server(2).load()
    server.hear(0, opened(1))
    server.hear(1, killed(1))
    assert server.hear(0, Ready(epoch=1, rank=0)) == []
    server.leave(1, 0)
    assert server.hear(1, Ready(epoch=1, rank=1)) == []  # of a new engine, which the orders for the old one reached
    server.hear(1, Loaded(rank=1))
    assert server.leave(1, 1) == []  # it was told EndEpoch, too
    assert server.hear(1, Ready(epoch=1, rank=1)) == []
    assert server.hear(0, lost(0, epoch=1)) == []
    server.form(2)
    assert server.leave(1, 1) == []


@pytest.mark.parametrize(
    "message",
    [Ready(epoch=1, rank=1), opened(1), EpochLeft(epoch=1, rank=1), Loaded(rank=1), Ready(epoch=7, rank=1), join(1)],
    ids=lambda message: type(message).__name__,
)
def test_what_comes_out_of_turn_is_evidence(message):
    server = Server(2).run()
    server.hear(1, message)
    assert isinstance(server.actions[0], TellFrontend)
    assert [(rank, type(sent)) for rank, sent in server.sent()] == [(0, EndEpoch), (1, EndEpoch)]


def test_an_engine_that_speaks_out_of_turn_between_two_epochs_is_replaced():
    server = Server(2)
    server.on(Joined(1, "b"))
    server.hear(1, Loaded(rank=1))
    server.hear(1, Ready(epoch=1, rank=1))
    assert [(rank, type(sent)) for rank, sent in server.sent()] == [(1, KillEngine)]


def test_a_report_of_the_ranks_own_about_an_old_epoch_is_evidence_still():
    server = Server(2).run()
    server.hear(1, Report(rank=1, epoch=0, error="RuntimeError", message="on fire"))
    assert server.told() == [EpochEnded(epoch=1, reason="rank 1: RuntimeError: on fire", final=False)]


# Causes


def test_the_cause_is_the_death_and_not_the_links_it_broke():
    lost_link = Evidence(0, "EpPeerGone", "rank 1 closed its link")
    exited = Evidence(2, ENGINE_EXITED, "its engine ended: exit status 1", ended=True)
    own = Evidence(2, "ValueError", "bad shape")
    torn = Evidence(0, "RuntimeError", "connection closed by peer")
    outside = Evidence(1, ENGINE_KILLED, KILLED, ended=True, outside=True)
    gone = Evidence(3, SUPERVISOR_GONE, "its supervisor is gone", ended=True, outside=True)
    judged = Evidence(None, "EpDeadline", "rank 1 did not move")
    assert root_cause([lost_link, exited]) is exited
    assert root_cause([lost_link, torn, exited]) is exited  # it said nothing itself: the others speak of its end
    assert root_cause([lost_link, exited, own]) is own  # a rank's own words explain its end
    assert root_cause([lost_link, own, exited, outside]) is outside
    assert root_cause([lost_link, exited, gone, outside]) is gone
    assert root_cause([lost_link, Evidence(1, "EpDeadline", "")]) is lost_link
    assert root_cause([lost_link, judged]) is judged
