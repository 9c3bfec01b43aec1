"""What serve and the worker daemon do, put together from the parts: folder, listener, coordinator, supervisor, frontend."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ep_runtime.config import DEMO, RuntimeConfig, localise, resolve
from ep_runtime.frontend.listening import listen_http
from ep_runtime.settings import ConfigRefused, read_config, read_token
from ep_runtime.supervise.coordinator import Coordinator, package_version
from ep_runtime.supervise.engine_process import Post
from ep_runtime.supervise.folder import FolderError, RuntimeFolder, check_private, job_folder
from ep_runtime.supervise.frontend import Frontend, frontend_config
from ep_runtime.supervise.loop import Loop
from ep_runtime.supervise.place import Place, PlaceError, own_cores, read_facts, read_place
from ep_runtime.supervise.source import ModelNotFound, model_folder
from ep_runtime.supervise.supervisor import Supervisor
from protocol.address import connect, listen
from protocol.channel import never_closed
from protocol.errors import EpLinkLost

log = logging.getLogger("ep_runtime")

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
CONNECT_SECONDS = 5.0
"""What one try to reach the head may take."""
REFUSALS = (ConfigRefused, PlaceError, FolderError, ModelNotFound, EpLinkLost)
"""What ends a start with one line on the terminal."""


@dataclass(frozen=True, slots=True)
class Modules:
    """What the children run."""

    engine: str = "ep_runtime.engine.main"
    frontend: str = "ep_runtime.frontend.main"


@dataclass(slots=True)
class Outcome:
    """How the main part of this process ended."""

    loop: Loop
    status: int = 1
    cause: str = "interrupted"

    def set(self, status: int, cause: str) -> None:
        """Note it and end the loop."""
        self.status, self.cause = status, cause
        self.loop.stop()


def serve(argv: list[str], modules: Modules = Modules()) -> int:
    """One rank of a server: rank 0 with coordinator and frontend, or a worker. Returns the exit status."""
    try:
        config = read_config(argv)
        place = read_place(os.environ)
        start_logging(config.log_level, place.rank)
        return head(config, place, modules) if place.rank == 0 else follow(config, place, modules)
    except REFUSALS as error:
        print(f"ep-runtime: {error}", file=sys.stderr)
        return 2


def work(address: str, token_file: Path | None, device_index: int, modules: Modules = Modules()) -> int:
    """A worker daemon that gets its rank from the head, whenever that is there."""
    start_logging("info", None)
    try:
        token = read_token(token_file) if token_file is not None else os.environ.get("EP_RUNTIME_TOKEN")
        with RuntimeFolder(None) as folder:
            post = make_post(None, device_index, 1, folder.path, token, modules)
            return supervise(address, post, None)
    except REFUSALS as error:
        print(f"ep-runtime: {error}", file=sys.stderr)
        return 2


def head(given: RuntimeConfig, place: Place, modules: Modules) -> int:
    """Rank 0: everything starts and ends here."""
    try:
        config = resolve(given, read_facts(place, os.environ))
    except ValidationError as error:
        raise ConfigRefused("; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())) from error
    except ValueError as error:
        raise ConfigRefused(str(error)) from error
    path = job_folder(place.job, dict(os.environ)) if place.job else None
    with RuntimeFolder(path) as folder, open_http(config) as http, Loop() as loop:
        listener = open_listener(config, place, folder.path)
        model = model_folder(config.model)
        if config.model != DEMO and Path(config.model).is_dir():
            config = config.model_copy(update={"model": str(model)})
        told = frontend_config(config, model, folder.path, http.fileno())
        shown = localise(config, model=config.model, cores=own_cores(), local_world=place.local_world, token=config.token)
        print(f"ep-runtime {package_version()}: resolved configuration\n{shown.table()}", flush=True)
        outcome = Outcome(loop)
        coordinator = Coordinator(loop, config, outcome.set)
        ours, theirs = socket.socketpair()
        post = make_post(0, place.local_rank, place.local_world, folder.path, config.token, modules)
        # The supervisor's own end is not the server's: the coordinator finishes when every member has left.
        supervisor = Supervisor(loop, theirs, post, lambda status, cause: None)

        def asked_to_end(number: signal.Signals) -> None:
            supervisor.expect_end()
            coordinator.ask_stop(number.name)

        loop.on_signals(SIGNALS, asked_to_end)
        frontend = Frontend(loop, modules.frontend, told, http, coordinator.frontend_ended)
        coordinator.start(frontend, listener, ours)
        supervisor.start()
        loop.run()
        frontend.close()
        if listener is not None:
            listener.close()
    return report(outcome)


def open_http(config: RuntimeConfig) -> socket.socket:
    """Where HTTP clients connect; raises `ConfigRefused`."""
    try:
        return listen_http(config.host, config.port)
    except OSError as error:
        raise ConfigRefused(f"host {config.host}, port {config.port}: {error.strerror}") from error


def open_listener(config: RuntimeConfig, place: Place, folder: Path) -> socket.socket | None:
    """Where the other ranks join: a socket in the private folder, or TCP when some are on other hosts; None in a world of one."""
    if config.world_size == 1:
        return None
    if config.coordinator_host is None:
        return listen(f"unix:{folder / 'join'}")
    try:
        return listen(f"{config.coordinator_host}:{config.coordinator_port}")
    except OSError as error:
        raise ConfigRefused(
            f"coordinator_host {config.coordinator_host}, coordinator_port {config.coordinator_port}: {error}"
        ) from error


def follow(config: RuntimeConfig, place: Place, modules: Modules) -> int:
    """Rank r of torchrun. What the flags say of the model is the head's affair."""
    one_host = (config.world_size or place.world) == place.local_world and config.coordinator_host is None
    if not one_host:
        address = f"{config.coordinator_host or place.master_addr}:{config.coordinator_port or place.master_port + 1}"
        with RuntimeFolder(None) as own:
            post = make_post(place.rank, place.local_rank, place.local_world, own.path, config.token, modules)
            return supervise(address, post, config.rendezvous_timeout)
    folder = job_folder(place.job, dict(os.environ))
    post = make_post(place.rank, place.local_rank, place.local_world, folder, None, modules)
    return supervise(f"unix:{folder / 'join'}", post, config.rendezvous_timeout)


def supervise(address: str, post: Post, patience: float | None) -> int:
    """Join the head at `address`, run this rank's engine until the end. `patience`: seconds without a head, None: for ever."""

    def reach() -> socket.socket:
        if address.startswith("unix:"):
            check_private(post.runtime_dir)
        return connect(address, time.monotonic() + CONNECT_SECONDS, never_closed, tries_again=False)

    with Loop() as loop:
        outcome = Outcome(loop)
        supervisor = Supervisor(loop, None, post, outcome.set, connect=reach, patience=patience)
        loop.on_signals(SIGNALS, lambda number: supervisor.ask_stop(number.name))
        supervisor.start()
        loop.run()
    return report(outcome)


def make_post(
    rank: int | None, device_index: int, local_world: int, runtime_dir: Path, token: str | None, modules: Modules
) -> Post:
    """This process's place, with a nonce of its life."""
    return Post(
        rank=rank,
        host=socket.gethostname(),
        device_index=device_index,
        local_world=local_world,
        runtime_dir=runtime_dir,
        token=token,
        boot=secrets.token_hex(8),
        engine_module=modules.engine,
    )


def start_logging(level: str, rank: int | None) -> None:
    """Log lines on stderr that name the rank."""
    who = "worker" if rank is None else f"rank {rank}"
    logging.basicConfig(level=level.upper(), format=f"%(asctime)s %(levelname)s [{who}] %(message)s", stream=sys.stderr)


def report(outcome: Outcome) -> int:
    """The last line, and the exit status."""
    if outcome.status:
        print(f"ep-runtime failed: {outcome.cause}", file=sys.stderr, flush=True)
    return outcome.status
