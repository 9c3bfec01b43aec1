"""The coordinator: admits supervisors, turns what they send into events, and carries out what the membership decides."""

from __future__ import annotations

import hmac
import importlib.metadata
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ep_runtime.config import RuntimeConfig
from ep_runtime.supervise import events
from ep_runtime.supervise.deadlines import Lateness
from ep_runtime.supervise.events import Action, Event
from ep_runtime.supervise.frontend import Frontend
from ep_runtime.supervise.head_link import notice_dead_peer
from ep_runtime.supervise.loop import Loop, Timer
from ep_runtime.supervise.membership import Membership
from protocol.errors import EpLinkLost
from protocol.message_socket import MessageSocket
from protocol.messages import Join, Refused, ToCoordinator, ToSupervisor, Welcome

log = logging.getLogger(__name__)

JOIN_SECONDS = 10.0
"""What a new connection gets to say JOIN."""
SEND_SECONDS = 5.0
TICK_SECONDS = 0.25
"""Between looks at deadlines and at the ranks' progress."""
MAX_STRANGERS = 64
"""Connections that have not joined; for one more the oldest of them goes."""
ACCEPT_PAUSE_SECONDS = 1.0
"""After a connection that could not be taken: the listener stays readable, and looking again at once would be all that is done."""
JOIN_BYTES = 1 << 16
"""Longest message of one that has not joined: a stranger gets no more memory."""


@dataclass(slots=True, eq=False)
class Connection:
    """One supervisor's stream; `rank` is None until it is admitted."""

    link: MessageSocket
    local: bool
    rank: int | None = None
    timer: Timer | None = None


def package_version() -> str:
    """Version of this distribution, compared in JOIN."""
    return importlib.metadata.version("ep-runtime")


def refusal(join: Join, token: str | None, package: str) -> Refused | None:
    """Why a JOIN is turned away whatever the membership says, or None. The secret is never repeated."""
    if token is not None and not hmac.compare_digest(join.token.encode(), token.encode()):
        return Refused("the token is wrong")
    if join.package != package:
        return Refused(f"package version: this rank has {join.package}, the head has {package}")
    return None


def membership_of(config: RuntimeConfig) -> Membership:
    """The state machine for a resolved configuration."""
    assert config.world_size is not None
    limits = events.Limits(
        rendezvous=config.rendezvous_timeout,
        load=config.load_timeout,
        handshake=config.handshake_timeout,
        warm=config.warm_timeout,
        command=config.command_timeout,
        drain=config.drain_timeout,
        failed_starts=config.max_failed_starts,
        recoveries=config.max_recoveries,
    )
    return Membership(config.world_size, limits)


class Coordinator:
    """Lives in rank 0's serve process. `on_finish(status, cause)` is called once, when everything has ended."""

    def __init__(self, loop: Loop, config: RuntimeConfig, on_finish: Callable[[int, str], None]) -> None:
        self._loop = loop
        self._config = config
        self._on_finish = on_finish
        self._frontend: Frontend | None = None
        self._connections: list[Connection] = []
        self._members: dict[int, Connection] = {}
        self._events: deque[Event] = deque()
        self._membership = membership_of(config)
        self._lateness = Lateness(time.monotonic())
        self._ticks: Timer | None = None
        self._told = ""
        """Why the last connection was turned away: a spare asks again every few seconds, for as long as the server runs."""

    def start(self, frontend: Frontend, listener: socket.socket | None, own: socket.socket) -> None:
        """Begin to take ranks: the own supervisor's over `own`, the others' from `listener`."""
        self._frontend = frontend
        now = time.monotonic()
        self._lateness = Lateness(now)
        self._adopt(own, "the head's supervisor", local=True)
        if listener is not None:
            self._listen(listener)
        self._perform(self._membership.start(now))
        self._tick()

    def frontend_ended(self, event: events.FrontendEnded) -> None:
        """A frontend process is gone."""
        self._notify(event)

    def ask_stop(self, reason: str) -> None:
        """Begin an ordered end."""
        self._notify(events.StopAsked(reason))

    def _tick(self) -> None:
        self._lateness.tick(time.monotonic(), TICK_SECONDS)
        self._ticks = self._loop.later(TICK_SECONDS, self._tick)
        for connection in list(self._connections):
            self._readable(connection)  # a send that had to wait has read meanwhile, which wakes nobody
        self._notify(events.Tick())

    def _listen(self, listener: socket.socket) -> None:
        self._loop.watch(listener.fileno(), lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, where = listener.accept()
        except OSError as error:
            log.warning("a connection could not be taken: %s", error)
            self._loop.forget(listener.fileno())
            self._loop.later(ACCEPT_PAUSE_SECONDS, lambda: self._listen(listener))
            return
        strangers = [one for one in self._connections if one.rank is None and not one.local]
        if len(strangers) >= MAX_STRANGERS:
            # A supervisor says JOIN at once, so that it gets in however many strangers stay without a word.
            self._turn_away(strangers[0], Refused(f"{MAX_STRANGERS} others wait to join"))
        if sock.family != socket.AF_UNIX:
            notice_dead_peer(sock)
        connection = self._adopt(sock, f"connection from {where or 'this host'}", local=False)
        refused = Refused(f"no JOIN within {JOIN_SECONDS:g} s")
        connection.timer = self._loop.later(JOIN_SECONDS, lambda: self._turn_away(connection, refused))

    def _adopt(self, sock: socket.socket, peer: str, *, local: bool) -> Connection:
        connection = Connection(MessageSocket(sock, ToCoordinator, peer=peer, limit=JOIN_BYTES), local)
        self._connections.append(connection)
        self._loop.watch(connection.link.fileno(), lambda: self._readable(connection))
        return connection

    def _readable(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        try:
            messages = connection.link.ready()
        except EpLinkLost as error:
            log.debug("%s: %s", connection.link.peer, error)
            self._drop(connection)
            return
        for message in messages:
            if connection not in self._connections:
                return
            if connection.rank is not None:
                self._notify(events.Received(connection.rank, message))
            elif isinstance(message, Join):
                self._join(connection, message)
            else:
                self._turn_away(connection, Refused(f"the first message is {type(message).__name__}, not Join"))

    def _join(self, connection: Connection, join: Join) -> None:
        token = None if connection.local else self._config.token
        answer = refusal(join, token, package_version()) or self._membership.admit(join, connection.local)
        if isinstance(answer, Refused):
            self._turn_away(connection, answer)
            return
        if answer in self._members:
            log.warning("rank %d has connected again: its old connection is closed", answer)
            self._drop(self._members[answer])
        if connection.timer is not None:
            connection.timer.cancel()
        connection.rank = answer
        connection.link.trust()
        self._members[answer] = connection
        log.info("rank %d joined from %s (%s)", answer, join.host, join.device)
        self._notify(events.Joined(answer, join.boot))
        config = self._config.without_secrets().to_json()
        self._send(answer, Welcome(rank=answer, world=self._membership.world, config=config))

    def _turn_away(self, connection: Connection, refused: Refused) -> None:
        level = logging.DEBUG if refused.reason == self._told else logging.WARNING
        log.log(level, "%s refused: %s", connection.link.peer, refused.reason)
        self._told = refused.reason
        try:
            connection.link.send(refused, timeout=0.2)
        except EpLinkLost as error:
            log.debug("%s", error)
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        if connection.timer is not None:
            connection.timer.cancel()
        self._loop.forget(connection.link.fileno())
        connection.link.close()
        if connection.rank is not None:
            del self._members[connection.rank]
            self._notify(events.Left(connection.rank))

    def _notify(self, event: Event) -> None:
        """Events that arise while actions run wait for their turn."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            now = time.monotonic()
            self._perform(self._membership.handle(self._events[0], now, self._lateness.at(now)))
            self._events.popleft()

    def _perform(self, actions: list[Action]) -> None:
        assert self._frontend is not None
        for action in actions:
            match action:
                case events.Send(rank, message):
                    self._send(rank, message)
                case events.Drop(rank, reason):
                    self._give_up(rank, reason)
                case events.StartFrontend():
                    self._frontend.start()
                case events.EndFrontend(grace):
                    self._frontend.end(grace)
                case events.TellFrontend(message):
                    self._frontend.tell(message)
                case events.Announce(text, failure):
                    log.log(logging.WARNING if failure else logging.INFO, "%s", text)
                case events.Finish(status, cause):
                    self._finish(status, cause)

    def _send(self, rank: int, message: ToSupervisor) -> None:
        connection = self._members.get(rank)
        if connection is None:
            return  # its Left is among the events that wait
        try:
            connection.link.send(message, timeout=SEND_SECONDS)
        except EpLinkLost as error:
            log.warning("%s", error)
            self._drop(connection)

    def _give_up(self, rank: int, reason: str) -> None:
        connection = self._members.get(rank)
        if connection is not None:
            log.warning("rank %d is dropped: %s", rank, reason)
            self._drop(connection)

    def _finish(self, status: int, cause: str) -> None:
        if self._ticks is not None:
            self._ticks.cancel()
        self._on_finish(status, cause)
