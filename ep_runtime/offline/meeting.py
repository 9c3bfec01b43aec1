"""How the ranks of an offline job find each other: through torchrun's own store."""

from __future__ import annotations

import secrets
import socket

from ep_runtime.config import RuntimeConfig
from ep_runtime.engine.comm import connect_store, open_store
from ep_runtime.engine.epoch import EpochPlace
from ep_runtime.supervise.place import Place
from protocol.listener import Listener


def meet(place: Place, config: RuntimeConfig) -> tuple[Listener | None, EpochPlace, object]:
    """Rank 0 opens links and a store, and publishes their addresses; the others read them.

    Returns the listener for links on rank 0 of several, where the ranks meet, and what must live as long as their group.
    """
    if place.world == 1:
        return None, EpochPlace(epoch=0, world=1, store="", links="", token=""), None
    patience = config.rendezvous_timeout
    meeting = connect_store(f"{place.master_addr}:{place.master_port}", place.world, patience, patience)
    key = f"ep_runtime/{place.attempt}"
    local = place.world == place.local_world
    host = "127.0.0.1" if local else socket.gethostbyname(socket.gethostname())
    if place.rank == 0:
        listener = Listener(f"{host}:0")
        store, address = open_store(host, place.world)
        token = secrets.token_hex(16)
        meeting.set(key, f"{address} {listener.address} {token}")
        return (
            listener,
            EpochPlace(epoch=0, world=place.world, store=address, links=listener.address, token=token, host=host),
            store,
        )
    address, links, token = meeting.get(key).decode().split()
    return None, EpochPlace(epoch=0, world=place.world, store=address, links=links, token=token, host=host), None
