"""The coordinator: admits supervisors, turns what they send into events, and carries out what the membership decides."""

from __future__ import annotations

import hmac
import importlib.metadata
import logging
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ep_runtime.config import RuntimeConfig
from ep_runtime.supervise import membership as events
from ep_runtime.supervise.frontend import Frontend
from ep_runtime.supervise.loop import Loop, Timer
from ep_runtime.supervise.membership import Action, Deadlines, Event, Membership
from ep_runtime.supervise.process import Exit
from protocol.errors import EpLinkLost
from protocol.message_socket import MessageSocket
from protocol.messages import Join, Refused, ToCoordinator, ToSupervisor, Welcome

log = logging.getLogger(__name__)

JOIN_SECONDS = 10.0
"""What a new connection gets to say JOIN."""
SEND_SECONDS = 5.0
MAX_STRANGERS = 64
"""Connections that have not joined; more are closed at once."""


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


def refusal(join: Join, token: str | None, package: str) -> str | None:
    """Why a JOIN is turned away whatever the membership says, or None. The secret is never repeated."""
    if token is not None and not hmac.compare_digest(join.token.encode(), token.encode()):
        return "the token is wrong"
    if join.package != package:
        return f"package version: this rank has {join.package}, the head has {package}"
    return None


class Coordinator:
    """Lives in rank 0's serve process. `on_finish(status, cause)` is called once, when everything has ended."""

    def __init__(self, loop: Loop, config: RuntimeConfig, on_finish: Callable[[int, str], None]) -> None:
        assert config.world_size is not None
        self._loop = loop
        self._config = config
        self._on_finish = on_finish
        self._frontend: Frontend | None = None
        self._connections: list[Connection] = []
        self._members: dict[int, Connection] = {}
        self._events: deque[Event] = deque()
        self._deadline: Timer | None = None
        self._membership = Membership(
            world=config.world_size,
            deadlines=Deadlines(
                rendezvous=config.rendezvous_timeout,
                load=config.load_timeout,
                handshake=config.handshake_timeout,
                warm=config.warm_timeout,
                drain=config.drain_timeout,
            ),
        )

    def start(self, frontend: Frontend, listener: socket.socket | None, own: socket.socket) -> None:
        """Begin to take ranks: the own supervisor's over `own`, the others' from `listener`."""
        self._frontend = frontend
        self._adopt(own, "the head's supervisor", local=True)
        if listener is not None:
            self._loop.watch(listener.fileno(), lambda: self._accept(listener))
        self._perform(self._membership.start())

    def frontend_ended(self, how: Exit) -> None:
        """The frontend process is gone."""
        self._notify(events.FrontendEnded(how=str(how), clean=how.clean))

    def ask_stop(self, reason: str) -> None:
        """Begin an ordered end."""
        self._notify(events.StopAsked(reason))

    def _accept(self, listener: socket.socket) -> None:
        sock, where = listener.accept()
        if sum(connection.rank is None for connection in self._connections) >= MAX_STRANGERS:
            sock.close()
            return
        connection = self._adopt(sock, f"connection from {where or 'this host'}", local=False)
        connection.timer = self._loop.later(JOIN_SECONDS, lambda: self._turn_away(connection, f"no JOIN within {JOIN_SECONDS:g} s"))

    def _adopt(self, sock: socket.socket, peer: str, *, local: bool) -> Connection:
        connection = Connection(MessageSocket(sock, ToCoordinator, peer=peer), local)
        self._connections.append(connection)
        self._loop.watch(connection.link.fileno(), lambda: self._readable(connection))
        return connection

    def _readable(self, connection: Connection) -> None:
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
                self._turn_away(connection, f"the first message is {type(message).__name__}, not Join")

    def _join(self, connection: Connection, join: Join) -> None:
        token = None if connection.local else self._config.token
        answer = refusal(join, token, package_version()) or self._membership.admit(join, connection.local)
        if isinstance(answer, str):
            self._turn_away(connection, answer)
            return
        if connection.timer is not None:
            connection.timer.cancel()
        connection.rank = answer
        self._members[answer] = connection
        log.info("rank %d joined from %s (%s)", answer, join.host, join.device)
        config = self._config.without_secrets().to_json()
        self._send(answer, Welcome(rank=answer, world=self._membership.world, config=config))
        self._notify(events.Joined(answer))

    def _turn_away(self, connection: Connection, reason: str) -> None:
        log.warning("%s refused: %s", connection.link.peer, reason)
        try:
            connection.link.send(Refused(reason=reason), timeout=0.2)
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
            self._perform(self._membership.handle(self._events[0]))
            self._events.popleft()

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case events.Send(rank, message):
                    self._send(rank, message)
                case events.SetDeadline(seconds):
                    self._set_deadline(seconds)
                case events.EndFrontend(grace):
                    assert self._frontend is not None
                    self._frontend.end(grace)
                case events.TellFrontend(epoch, reason):
                    assert self._frontend is not None
                    self._frontend.tell_ended(epoch, reason)
                case events.Announce(text):
                    log.info("%s", text)
                case events.Finish(status, cause):
                    self._set_deadline(None)
                    self._on_finish(status, cause)

    def _send(self, rank: int, message: ToSupervisor) -> None:
        connection = self._members.get(rank)
        if connection is None:
            return  # its Left is among the events that wait
        try:
            connection.link.send(message, timeout=SEND_SECONDS)
        except EpLinkLost as error:
            log.warning("%s", error)
            self._drop(connection)

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = self._loop.later(seconds, lambda: self._notify(events.DeadlinePassed()))
