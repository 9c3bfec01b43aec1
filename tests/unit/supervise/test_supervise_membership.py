"""The membership state machine, event by event."""

import pytest

from ep_runtime.supervise.evidence import ENGINE_EXITED, ENGINE_KILLED, Evidence, root_cause
from ep_runtime.supervise.membership import (
    Announce,
    DeadlinePassed,
    Deadlines,
    EndFrontend,
    Finish,
    FrontendEnded,
    Joined,
    Left,
    Membership,
    Phase,
    Received,
    Send,
    SetDeadline,
    StopAsked,
    TellFrontend,
)
from protocol.messages import BeginEpoch, EpochOpened, Join, Loaded, OpenEpoch, Progress, Ready, Report, Stop

DEADLINES = Deadlines(rendezvous=300, load=3600, handshake=60, warm=300, drain=15)
OPENED = EpochOpened(epoch=1, store="host:1", links="unix:/x")


def join(rank: int | None) -> Join:
    return Join(token="", host="h", boot="b", rank=rank, device="cpu", package="p")


def of_kind(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def running(world: int) -> Membership:
    """A membership driven to RUNNING by the ordered sequence of events."""
    state = Membership(world=world, deadlines=DEADLINES)
    state.start()
    for rank in range(world):
        state.handle(Joined(rank))
    for rank in range(world):
        state.handle(Received(rank, Loaded(rank=rank)))
    state.handle(Received(0, OPENED))
    for rank in range(world):
        state.handle(Received(rank, Ready(epoch=1, rank=rank)))
    assert state.phase is Phase.RUNNING
    return state


def test_the_ordered_start_sends_each_message_once_and_in_order():
    state = Membership(world=2, deadlines=DEADLINES)
    assert state.start() == [SetDeadline(300)]
    assert state.handle(Joined(1)) == []
    assert state.handle(Joined(0)) == [SetDeadline(3600)]
    assert state.handle(Received(0, Loaded(rank=0))) == []
    assert state.handle(Received(1, Loaded(rank=1))) == [SetDeadline(60), Send(0, OpenEpoch(epoch=1, world=2))]
    begin = BeginEpoch(epoch=1, world=2, store="host:1", links="unix:/x")
    assert state.handle(Received(0, OPENED)) == [SetDeadline(360), Send(0, begin), Send(1, begin)]
    assert state.handle(Received(1, Ready(epoch=1, rank=1))) == []
    assert state.handle(Received(0, Ready(epoch=1, rank=0))) == [SetDeadline(None), Announce("epoch 1 runs on 2 ranks")]


def test_a_rank_may_load_before_the_others_have_joined():
    state = Membership(world=2, deadlines=DEADLINES)
    state.handle(Joined(0))
    assert state.handle(Received(0, Loaded(rank=0))) == []
    state.handle(Joined(1))
    assert state.phase is Phase.LOADING
    assert Send(0, OpenEpoch(epoch=1, world=2)) in state.handle(Received(1, Loaded(rank=1)))


def test_admission():
    state = Membership(world=3, deadlines=DEADLINES)
    assert state.admit(join(None), local=True) == 0
    assert "outside" in state.admit(join(0), local=False)
    assert "outside" in state.admit(join(3), local=False)
    assert state.admit(join(2), local=False) == 2
    state.handle(Joined(2))
    assert "already" in state.admit(join(2), local=False)
    assert state.admit(join(None), local=False) == 1
    state.handle(Joined(1))
    assert "all 3 ranks" in state.admit(join(None), local=False)
    state.handle(Joined(0))
    assert "not taking ranks" in state.admit(join(1), local=False)


def test_an_ordered_stop_drains_the_frontend_first_and_ends_with_status_0():
    state = running(2)
    actions = state.handle(StopAsked("SIGTERM"))
    assert of_kind(actions, EndFrontend) == [EndFrontend(17.0)]
    assert of_kind(actions, Send) == []
    assert state.handle(StopAsked("SIGTERM again")) == []
    stops = of_kind(state.handle(FrontendEnded("exit status 0", clean=True)), Send)
    assert [(stop.rank, type(stop.message), stop.message.grace) for stop in stops] == [(0, Stop, 3.0), (1, Stop, 3.0)]
    assert state.handle(Left(1)) == []
    assert state.handle(Left(0)) == [Finish(0)]


def test_a_stop_before_the_epoch_runs_waits_for_nobody():
    state = Membership(world=2, deadlines=DEADLINES)
    state.handle(Joined(0))
    actions = state.handle(StopAsked("SIGTERM"))
    assert of_kind(actions, Send) == [Send(0, Stop(reason="SIGTERM", grace=0.0))]
    assert state.handle(FrontendEnded("exit status 0", clean=True)) == []
    assert state.handle(Left(0)) == [Finish(0)]


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (Received(1, Report(rank=1, epoch=1, error="RuntimeError", message="on fire")), "rank 1: RuntimeError: on fire"),
        (Left(1), "rank 1: its supervisor is gone"),
        (FrontendEnded("killed by SIGSEGV", clean=False), "the frontend ended: killed by SIGSEGV"),
        (Received(1, OPENED), "rank 1: sent EpochOpened during running"),
    ],
)
def test_evidence_of_a_failure_ends_everything_at_once_with_status_1(event, cause):
    state = running(2)
    actions = state.handle(event)
    assert actions[0] == Announce(f"failed: {cause}")
    assert all(stop.message.grace == 0.0 for stop in of_kind(actions, Send))
    told = of_kind(actions, TellFrontend)
    assert told == ([] if isinstance(event, FrontendEnded) else [TellFrontend(1, cause)])
    rest = [*(Left(rank) for rank in sorted(state.members)), *([FrontendEnded("", clean=True)] if state.frontend_alive else [])]
    last = [state.handle(event) for event in rest][-1]
    assert last == [Finish(1, cause)]


def test_a_report_from_a_draining_server_is_a_failure_too():
    state = running(1)
    state.handle(StopAsked("SIGTERM"))
    state.handle(Received(0, Report(rank=0, epoch=1, error=ENGINE_KILLED, message="its engine ended: killed by SIGKILL")))
    state.handle(FrontendEnded("exit status 0", clean=True))
    assert state.handle(Left(0)) == [Finish(1, "rank 0: its engine ended: killed by SIGKILL")]


def test_messages_that_cross_with_a_stop_are_no_failure():
    state = running(2)
    state.handle(StopAsked("SIGTERM"))
    assert state.handle(Received(1, Ready(epoch=1, rank=1))) == []
    assert state.evidence == []


def test_deadlines_name_who_did_not_move_and_where_it_was_seen():
    state = Membership(world=3, deadlines=DEADLINES)
    state.handle(Joined(0))
    assert state.handle(DeadlinePassed())[0] == Announce("failed: rendezvous: nothing from ranks 1, 2 after 300 s")
    state = Membership(world=2, deadlines=DEADLINES)
    for rank in range(2):
        state.handle(Joined(rank))
    state.handle(Received(1, Progress(rank=1, epoch=1, step=7, phase="warm-up")))
    state.handle(Received(0, Loaded(rank=0)))
    text = "failed: load: nothing from rank 1 after 3600 s (rank 1 was last seen in step 7, warm-up)"
    assert state.handle(DeadlinePassed())[0] == Announce(text)


def test_processes_that_do_not_end_are_given_up():
    state = running(2)
    state.handle(StopAsked("SIGTERM"))
    state.handle(FrontendEnded("exit status 0", clean=True))
    state.handle(Left(0))
    assert state.handle(DeadlinePassed()) == [Finish(1, "not ended after 8 s: ranks 1")]


def test_the_cause_is_the_death_and_not_the_links_it_broke():
    lost = Evidence(0, "EpPeerGone", "rank 1 closed its link")
    exited = Evidence(2, ENGINE_EXITED, "its engine ended: exit status 1")
    own = Evidence(2, "ValueError", "bad shape")
    killed = Evidence(1, ENGINE_KILLED, "its engine ended: killed by SIGKILL")
    assert root_cause([lost, exited]) is exited
    assert root_cause([lost, exited, own]) is own
    assert root_cause([lost, own, exited, killed]) is killed
    assert root_cause([lost, Evidence(1, "EpDeadline", "")]) is lost
