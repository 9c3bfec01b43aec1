"""The coordinator over real sockets: who is let in, what is sent, and what happens to connections."""

import errno
import socket
import time

import pytest

from ep_runtime.config import RuntimeConfig
from ep_runtime.supervise.coordinator import Coordinator, package_version
from ep_runtime.supervise.epoch_record import Phase
from ep_runtime.supervise.events import FrontendEnded
from ep_runtime.supervise.loop import Loop
from protocol.address import listen
from protocol.errors import EpPeerGone
from protocol.message_socket import MessageSocket
from protocol.messages import (
    BeginEpoch,
    EndEpoch,
    EpochEnded,
    EpochLeft,
    EpochOpened,
    Join,
    Loaded,
    OpenEpoch,
    Progress,
    Ready,
    Recovered,
    Refused,
    Report,
    Stop,
    ToSupervisor,
    Welcome,
)

WAIT_SECONDS = 20.0


class FakeFrontend:
    """Takes down what it is asked."""

    def __init__(self) -> None:
        self.told: list = []
        self.asked: list[str] = []

    def start(self) -> None:
        self.asked.append("start")

    def end(self, grace: float) -> None:
        self.asked.append("end")

    def tell(self, message) -> None:
        self.told.append(message)


class Stand:
    """A coordinator of a world of two, and the ends of its ranks' sockets."""

    def __init__(self, loop: Loop, folder, **settings) -> None:
        self.loop = loop
        self.frontend = FakeFrontend()
        self.finished: list[tuple[int, str]] = []
        config = RuntimeConfig(world_size=2, **settings)
        self.coordinator = Coordinator(loop, config, lambda status, cause: self.finished.append((status, cause)))
        self.address = f"{folder}/join"
        self.listener = listen(f"unix:{self.address}")
        ours, theirs = socket.socketpair()
        self.links = [MessageSocket(theirs, ToSupervisor, peer="the coordinator")]
        self.coordinator.start(self.frontend, self.listener, ours)  # type: ignore[arg-type]

    def connect(self, boot: str, rank: int | None = 1, token: str = "", package: str | None = None) -> MessageSocket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(self.address)
        link = MessageSocket(sock, ToSupervisor, peer="the coordinator")
        self.links.append(link)
        link.send(Join(token=token, host="h", boot=boot, rank=rank, device="d", package=package or package_version()))
        return link

    def join_own(self) -> MessageSocket:
        self.links[0].send(Join(token="", host="h", boot="own", rank=0, device="d", package=package_version()))
        return self.links[0]

    def until(self, done) -> None:
        """Run the loop until `done()`."""
        end = time.monotonic() + WAIT_SECONDS

        def look() -> None:
            if done() or time.monotonic() > end:
                self.loop.stop()
            else:
                self.loop.later(0.005, look)

        self.loop.later(0.0, look)
        self.loop.run()
        assert time.monotonic() < end, "it did not come"

    def hear(self, link: MessageSocket):
        """The next message that the coordinator sends over `link`; EpPeerGone when it closes it."""
        got: list = []

        def look() -> bool:
            try:
                got.extend(link.ready())
            except EpPeerGone as error:
                got.append(error)
            return bool(got)

        self.until(look)
        assert len(got) == 1, got
        return got[0]

    def run(self) -> tuple[MessageSocket, MessageSocket]:
        """Both ranks in a running epoch 1."""
        own, other = self.join_own(), self.connect("other")
        for rank, link in enumerate((own, other)):
            assert isinstance(self.hear(link), Welcome)
            link.send(Loaded(rank=rank))
        self.form(own, other, 1)
        return own, other

    def form(self, own: MessageSocket, other: MessageSocket, epoch: int) -> None:
        assert self.hear(own) == OpenEpoch(epoch=epoch, world=2)
        own.send(EpochOpened(epoch=epoch, store="s", links="l"))
        for rank, link in enumerate((own, other)):
            assert self.hear(link) == BeginEpoch(epoch=epoch, world=2, store="s", links="l")
            link.send(Ready(epoch=epoch, rank=rank))
        self.until(lambda: self.coordinator._membership.phase is Phase.RUNNING)


@pytest.fixture
def stand(tmp_path):
    made = []
    with Loop() as loop:

        def make(**settings) -> Stand:
            made.append(Stand(loop, tmp_path, **settings))
            return made[-1]

        yield make
        for each in made:
            each.listener.close()
            for connection in list(each.coordinator._connections):
                connection.link.close()
            for link in each.links:
                link.close()


def test_an_epoch_is_formed_ended_and_followed_by_the_next(stand):
    server = stand()
    own, other = server.run()
    killed = Report(rank=1, epoch=1, error="EngineKilled", message="its engine ended: killed by SIGKILL", ended=True, outside=True)
    other.send(killed)
    reason = "rank 1: its engine ended: killed by SIGKILL"
    for link in (own, other):
        assert server.hear(link) == EndEpoch(epoch=1, reason=reason)
    assert server.frontend.told == [EpochEnded(epoch=1, reason=reason, final=False)]
    own.send(EpochLeft(epoch=1, rank=0))
    other.send(Loaded(rank=1, seconds={"load": 0.5}))
    server.form(own, other, 2)
    server.until(lambda: len(server.frontend.told) == 3)
    assert isinstance(server.frontend.told[2], Recovered)
    assert server.frontend.told[2].seconds["load"] == 0.5


def test_who_is_turned_away_and_who_may_come_again(stand):
    server = stand(token="0123456789abcdef")
    assert server.hear(server.connect("a", token="no")) == Refused("the token is wrong")
    package = Refused(f"package version: this rank has 0, the head has {package_version()}")
    assert server.hear(server.connect("a", token="0123456789abcdef", package="0")) == package
    assert isinstance(server.hear(server.connect("a", token="0123456789abcdef")), Welcome)
    assert server.hear(server.connect("b", token="0123456789abcdef")) == Refused("rank 1 has joined already", again=True)
    stranger = server.connect("c", token="0123456789abcdef", rank=5)
    assert server.hear(stranger) == Refused("rank 5 is outside the ranks 1 to 1 that may join")
    assert isinstance(server.hear(stranger), EpPeerGone)


def test_a_supervisor_that_connects_again_takes_the_place_of_its_old_connection(stand):
    server = stand()
    own, old = server.run()
    new = server.connect("other")
    assert isinstance(server.hear(new), Welcome)
    assert isinstance(server.hear(old), EpPeerGone)
    assert server.hear(own) == EndEpoch(epoch=1, reason="rank 1: its supervisor is gone")
    own.send(EpochLeft(epoch=1, rank=0))
    new.send(Loaded(rank=1))
    server.form(own, new, 2)


def test_a_silent_supervisor_is_dropped_and_one_that_reports_is_not(stand):
    server = stand(command_timeout=1.0)
    own, other = server.run()
    moves = iter(range(1, 10_000))
    dropped: list = []

    def beat() -> bool:
        number = next(moves)
        own.send(Progress(rank=0, epoch=1, step=number, command="PING", phase="WAITING", collectives=0, moves=number, idle_s=0.0))
        try:
            dropped.extend(other.ready())
        except EpPeerGone as error:
            dropped.append(error)
        return bool(dropped)

    server.until(beat)
    assert isinstance(dropped[0], EpPeerGone)
    assert server.hear(own) == EndEpoch(epoch=1, reason="rank 1: its supervisor is gone")


def test_what_was_read_while_a_send_waited_is_not_forgotten(stand):
    server = stand()
    own, other = server.run()
    # As a send that cannot go out at once does: it reads what comes, and no descriptor becomes readable for that.
    connection = server.coordinator._members[1]
    other.send(Report(rank=1, epoch=1, error="ValueError", message="bad"))
    server.loop.forget(connection.link.fileno())
    connection.link._read()
    server.loop.watch(connection.link.fileno(), lambda: None)
    assert server.hear(own) == EndEpoch(epoch=1, reason="rank 1: ValueError: bad")


def test_a_stop_ends_with_the_last_member_and_the_frontend(stand):
    server = stand()
    own, other = server.run()
    server.coordinator.ask_stop("SIGTERM")
    assert server.frontend.asked == ["start", "end"]
    server.coordinator.frontend_ended(FrontendEnded("exit status 0", ready=True))
    for link in (own, other):
        assert server.hear(link) == Stop(reason="drained", grace=3.0)
        link.close()
    server.until(lambda: bool(server.finished))
    assert server.finished == [(0, "")]


def test_a_process_without_descriptors_takes_no_connection_and_does_all_else(stand, monkeypatch):
    stand = stand()
    accept, tries = socket.socket.accept, 0

    def out_of_descriptors(listener):
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", out_of_descriptors)
    link = stand.connect("late")
    assert isinstance(stand.hear(stand.join_own()), Welcome)
    stand.until(lambda: tries > 0)
    assert stand.listener.fileno() not in stand.loop._selector.get_map(), "it stays readable: the loop would only look at it"
    monkeypatch.setattr(socket.socket, "accept", accept)
    assert isinstance(stand.hear(link), Welcome)


def test_a_spare_that_asks_again_and_again_is_logged_once(stand, caplog):
    stand = stand()
    stand.run()
    for number in range(4):
        assert stand.hear(stand.connect(f"spare{number}", rank=None)).reason == "all 2 ranks have joined"
    assert stand.hear(stand.connect("other", package="1")).reason.startswith("package version")
    warned = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert [text.partition("refused: ")[2][:9] for text in warned] == ["all 2 ran", "package v"]
