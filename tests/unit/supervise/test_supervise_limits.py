"""The membership's limits and deadlines, the frontend's life, and the end, event by event."""

import pytest

from ep_runtime.supervise.epoch_record import Phase
from ep_runtime.supervise.events import (
    Announce,
    Drop,
    EndFrontend,
    Finish,
    FrontendEnded,
    Joined,
    Left,
    Send,
    StartFrontend,
    StopAsked,
)
from ep_runtime.supervise.evidence import ENGINE_KILLED
from ep_runtime.supervise.limits import Recoveries, Starts
from protocol.messages import (
    EpochEnded,
    KillEngine,
    Loaded,
    OpenEpoch,
    Progress,
    Ready,
    Refused,
    Report,
    Stop,
)
from tests.support.membership_driver import KILLED, Server, crashed, join, killed, lost, opened

# Limits


def test_starts_that_fail_in_a_row_end_the_server_and_the_last_words_are_the_cause():
    server = Server(2, failed_starts=3).run()
    server.hear(1, killed(1))  # it had been ready: no failed start
    server.leave(1, 0)
    for _ in range(2):
        server.hear(1, Report(rank=1, epoch=0, error="ValueError", message="bad shape"))
        server.hear(1, crashed(1, 0))
        assert server.state.phase is Phase.GATHERING
    server.hear(1, crashed(1, 0))
    cause = "rank 1: 3 starts in a row have failed; the last: rank 1: ValueError: bad shape"
    assert server.told() == [EpochEnded(epoch=1, reason=cause, final=True)]
    assert server.sent() == [(rank, Stop(reason=cause, grace=0.0)) for rank in (0, 1)]
    assert server.of(EndFrontend) == [EndFrontend(2.0)]
    server.on(FrontendEnded("exit status 0"))
    server.on(Left(1))
    assert server.on(Left(0)) == [Finish(1, cause)]


def test_an_engine_that_was_ready_between_its_deaths_may_die_for_ever():
    server = Server(1, failed_starts=1).run()
    for epoch in range(1, 20):
        server.hear(0, killed(0, epoch))
        server.hear(0, Loaded(rank=0))
        server.form(epoch + 1)


def test_more_failed_epochs_within_an_hour_than_allowed_end_the_server():
    server = Server(1, recoveries=2).run()
    for epoch in range(1, 3):
        server.hear(0, killed(0, epoch), after=1000)
        server.hear(0, Loaded(rank=0))
        server.form(epoch + 1)
    server.hear(0, killed(0, 3), after=1000)
    assert server.told()[-1].reason == f"more than 2 epochs failed within an hour; the last: rank 0: {KILLED}"
    assert server.told()[-1].final


def test_old_recoveries_are_forgotten():
    recoveries = Recoveries(2)
    assert [recoveries.note(time) for time in (0, 1, 3599, 3600, 3601, 7300)] == [False, False, True, True, True, False]


def test_starts_that_fail_in_a_row_wait_ever_longer():
    starts = Starts(limit=20)
    pauses = []
    for _ in range(9):
        pauses.append(starts.pause)
        assert not starts.ended()
    assert pauses == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    starts.ready()
    assert (starts.pause, starts.ended(), starts.pause) == (0, False, 0)


def test_epochs_that_cannot_be_formed_are_tried_ever_later_and_then_given_up():
    server = Server(2, failed_starts=3).run()
    refused = "EpHandshakeRefused"
    server.hear(1, Report(rank=1, epoch=1, error=refused, message="torch"))
    server.leave(1, 0, 1)
    assert (0, OpenEpoch(epoch=2, world=2)) in server.sent()  # the first attempt after a running one comes at once
    for epoch, pause in ((2, 0.5), (3, 1.0)):
        server.hear(0, opened(epoch))
        server.hear(1, Report(rank=1, epoch=epoch, error=refused, message="torch"))
        server.leave(epoch, 0, 1)
        assert server.sent() == []
        assert server.tick(pause - 0.1) == []
        assert server.tick(0.2) == [Send(0, OpenEpoch(epoch=epoch + 1, world=2))]
    server.hear(0, opened(4))
    server.hear(1, Report(rank=1, epoch=4, error=refused, message="torch"))
    server.leave(4, 0, 1)
    assert server.told()[-1].reason == "3 epochs in a row could not be formed; the last: rank 1: EpHandshakeRefused: torch"


def test_fatal_reports_and_before_the_first_epoch_refusals_end_the_server_at_once():
    server = Server(2).run()
    server.hear(1, Report(rank=1, epoch=1, error="ModelNotFound", message="gone", fatal=True))
    assert server.told() == [EpochEnded(epoch=1, reason="rank 1: ModelNotFound: gone", final=True)]
    for error in ("UnsupportedModel", "CheckpointError", "MemoryPlanError", "EpHandshakeRefused"):
        server = Server(2)
        server.on(Joined(1, "b"))
        server.hear(1, Report(rank=1, epoch=0, error=error, message="no"))
        assert server.told() == [EpochEnded(epoch=0, reason=f"rank 1: {error}: no", final=True)]
        server = Server(2).run()
        server.hear(1, Report(rank=1, epoch=1, error=error, message="no"))
        assert not server.told()[0].final


def test_the_heads_own_supervisor_cannot_come_back():
    server = Server(2).run()
    server.on(Left(0))
    assert server.told() == [EpochEnded(epoch=1, reason="rank 0: its supervisor is gone", final=True)]


# Deadlines


def test_deadlines_name_who_did_not_come():
    server = Server(3)
    server.on(Joined(0, "a"))
    assert server.tick(299) == []
    assert server.tick(2)[0] == Announce("failed: rendezvous: nothing from ranks 1, 2 after 300 s", failure=True)
    server = Server(2)
    for rank in range(2):
        server.on(Joined(rank, "b"), after=100)
    server.hear(0, Loaded(rank=0))
    assert server.tick(3599) == []
    assert server.tick(2)[0] == Announce("failed: load: nothing from rank 1 after 3600 s", failure=True)


def test_the_pause_before_a_start_is_not_counted_as_its_load():
    server = Server(1, load=3).run()
    server.hear(0, killed(0))
    server.hear(0, crashed(0, 0))
    server.hear(0, crashed(0, 0))  # the next start waits 1 s
    assert server.tick(3.9) == []
    assert server.tick(0.2)[0] == Announce("failed: load: nothing from rank 0 after 3 s", failure=True)


def test_an_absent_rank_of_a_server_that_has_run_has_the_rendezvous_time_too():
    server = Server(2).run()
    server.on(Left(1), after=1000)
    server.leave(1, 0)
    assert server.tick(299) == []
    server.tick(2)
    assert server.told()[-1] == EpochEnded(epoch=1, reason="rendezvous: nothing from rank 1 after 300 s", final=True)


def test_opening_and_forming_have_their_own_time_and_are_tried_again():
    server = Server(2).load()
    assert server.tick(59) == []
    server.tick(2)
    assert server.told()[0].reason == "EpDeadline: opening the epoch: nothing from rank 0 after 60 s"
    server.leave(1, 0, 1)
    assert server.tick(0.5) == [Send(0, OpenEpoch(epoch=2, world=2))]
    server.hear(0, opened(2))
    server.hear(0, Ready(epoch=2, rank=0))
    at = Progress(rank=1, epoch=2, step=0, command="", phase="CONNECTING", collectives=0, moves=3, idle_s=358.0)
    server.hear(1, at, after=358)
    server.tick(2)
    assert server.told()[0].reason == (
        "EpDeadline: handshake: rank 1 not ready after 360 s; behind: rank 0; rank 0: no progress seen; "
        "rank 1: step 0, connecting, 0 collectives, still for 358.0 s"
    )


def test_the_callers_own_lateness_is_added_to_every_deadline():
    server = Server(2).run()
    server.hear(1, killed(1))
    server.tick(10, late=9)
    assert server.sent() == []
    server.tick(1, late=9)
    assert [type(message) for _, message in server.sent()] == [KillEngine]


def page(rank: int, moves: int, epoch: int = 1) -> Progress:
    return Progress(rank=rank, epoch=epoch, step=moves, command="DECODE", phase="EXECUTING", collectives=1, moves=moves, idle_s=0.0)


def test_a_rank_that_does_not_move_ends_the_epoch_and_a_silent_one_is_dropped():
    server = Server(2, command=2.0).run()
    for number in range(10):
        server.hear(0, page(0, number), after=0.25)
        server.hear(1, page(1, min(number, 3)))
        assert server.tick(0.0) == []
    for number in range(10, 13):
        server.hear(0, page(0, number), after=0.25)
        server.hear(1, page(1, 3))
    server.tick(0.0)
    assert server.told()[0].reason.startswith("EpDeadline: rank 1 did not move for 2 s; behind: rank 1; rank 0: step 12 DECODE")
    server = Server(2, command=2.0).run()
    for number in range(10):
        server.hear(0, page(0, number), after=0.25)
        actions = server.tick(0.0)
    assert actions == [Drop(1, "nothing came for 2 s")]


# The frontend


def test_a_dead_frontend_is_started_again_at_once_and_the_engines_run_on():
    server = Server(2).run()
    for _ in range(10):
        text = "the frontend ended: killed by SIGKILL; it is started again"
        assert server.on(FrontendEnded("killed by SIGKILL", ready=True)) == [Announce(text, failure=True), StartFrontend()]
    assert server.state.phase is Phase.RUNNING


def test_a_frontend_that_does_not_come_up_is_started_ever_later_and_then_given_up():
    server = Server(2, failed_starts=3).run()
    for pause in (0.5, 1.0):
        assert server.on(FrontendEnded("exit status 7"))[1:] == []
        assert server.tick(pause - 0.1) == []
        assert server.tick(0.2) == [StartFrontend()]
    server.on(FrontendEnded("exit status 7"))
    cause = "the frontend: 3 starts in a row have failed; the last: exit status 7"
    assert server.actions[0] == Announce(f"failed: {cause}", failure=True)
    assert server.told() == []  # there is none
    server.on(Left(0))
    assert server.on(Left(1)) == [Finish(1, cause)]


def test_a_frontend_that_refuses_its_settings_ends_the_server_unless_it_had_served():
    server = Server(1)
    assert server.on(FrontendEnded("exit status 2", refused=True))[0].text == "failed: the frontend ended: exit status 2"
    server = Server(1).run()
    server.on(FrontendEnded("killed by SIGKILL", ready=True))
    server.on(FrontendEnded("exit status 2", refused=True))
    assert server.state.phase is Phase.RUNNING


# The end


def test_an_ordered_stop_drains_the_frontend_first_and_ends_with_status_0():
    server = Server(2).run()
    assert server.on(StopAsked("SIGTERM")) == [Announce("stopping (SIGTERM)"), EndFrontend(17.0)]
    assert server.on(StopAsked("SIGTERM again")) == []
    assert server.hear(1, Stop(reason="SIGTERM", grace=0)) == []
    assert server.on(FrontendEnded("exit status 0")) == [Send(rank, Stop(reason="drained", grace=3.0)) for rank in (0, 1)]
    assert server.on(Left(1)) == []
    assert server.on(Left(0)) == [Finish(0)]


def test_failures_while_draining_are_recovered_as_always():
    server = Server(2).run()
    server.on(StopAsked("SIGTERM"))
    server.hear(1, killed(1))
    server.leave(1, 0)
    server.hear(1, Loaded(rank=1))
    server.form(2)
    server.on(FrontendEnded("exit status 0"))
    server.on(Left(1))
    assert server.on(Left(0)) == [Finish(0)]


def test_a_stop_during_a_recovery_drains_and_engines_get_no_grace_if_none_run_at_its_end():
    server = Server(2).run()
    server.hear(1, killed(1))
    server.on(StopAsked("SIGTERM"))
    assert server.of(EndFrontend) == [EndFrontend(17.0)]
    assert server.on(FrontendEnded("exit status 0")) == [Send(rank, Stop(reason="drained", grace=0.0)) for rank in (0, 1)]
    assert server.hear(0, lost(0)) == [Announce("while stopping: rank 0: EpPeerGone: a link ended", failure=True)]
    server.on(Left(1))
    assert server.on(Left(0)) == [Finish(0)]


def test_a_stop_while_the_frontend_is_being_restarted_waits_for_nobody():
    server = Server(1).run()
    server.on(FrontendEnded("exit status 7"))
    assert server.on(StopAsked("SIGTERM"))[1:] == [Send(0, Stop(reason="SIGTERM", grace=3.0))]
    assert server.on(Left(0)) == [Finish(0)]


@pytest.mark.parametrize("phase", ["gathering", "opening", "forming"])
def test_a_stop_before_any_epoch_has_run_waits_for_nobody(phase):
    server = Server(2)
    server.on(Joined(0, "a"))
    members = [0]
    if phase != "gathering":
        server.load()
        members = [0, 1]
    if phase == "forming":
        server.hear(0, opened(1))
    server.on(StopAsked("SIGTERM"))
    assert server.told()[0].final
    assert server.sent() == [(rank, Stop(reason="SIGTERM", grace=0.0)) for rank in members]
    assert server.state.admit(join(1, "late"), local=False) == Refused("the server is stopping", again=True)
    assert server.on(FrontendEnded("exit status 0")) == []
    for rank in members:
        server.on(Left(rank))
    assert server.actions == [Finish(0)]


def test_an_engine_that_fails_in_an_ordered_stop_shows_in_the_status():
    server = Server(1).run()
    server.on(StopAsked("SIGTERM"))
    server.on(FrontendEnded("exit status 0"))
    server.hear(0, Report(rank=0, epoch=1, error=ENGINE_KILLED, message="its engine ended: killed by SIGSEGV", ended=True))
    assert server.on(Left(0)) == [Finish(1, "rank 0: its engine ended: killed by SIGSEGV")]


def test_a_drain_that_does_not_end_and_processes_that_do_not_are_given_up():
    server = Server(2).run()
    server.on(StopAsked("SIGTERM"))
    assert server.tick(18.9) == []
    server.tick(0.2)
    assert [type(message) for _, message in server.sent()] == [Stop, Stop]
    server.on(Left(0))
    assert server.tick(7.9) == []
    assert server.tick(0.2) == [Finish(1, "not ended after 8 s: rank 1, the frontend")]
