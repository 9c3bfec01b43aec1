"""The frontend as serve sees it: its settings, its listening socket, one process after another, and what they are told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import zmq
from pydantic import ValidationError

from ep_runtime.config import RuntimeConfig
from ep_runtime.frontend.config import FrontendConfig
from ep_runtime.settings import ConfigRefused
from ep_runtime.supervise.events import FrontendEnded
from ep_runtime.supervise.loop import Loop
from ep_runtime.supervise.process import Child
from protocol.codec import encode
from protocol.messages import EpochEnded, Recovered

QUEUE_MESSAGES = 1000
"""Messages that wait for a frontend that does not read; a recovery sends three."""
REFUSED_STATUS = 2
"""`ep_runtime.frontend.main.EXIT_CONFIG`: starting again does not help."""
READY_LINE = b"ready"
"""What the frontend prints once an engine has announced itself to it."""
REFUSED_LINE = b"refused: "
"""`ep_runtime.frontend.main.REFUSED_LINE`: what it prints, with the reason behind it, before it ends with REFUSED_STATUS."""
LONGEST_LINE = 65536
STEADY_SECONDS = 60.0
"""A frontend that lived so long had come up, though no engine may have let it say so."""
STDOUT = 1


def frontend_config(config: RuntimeConfig, model: Path, runtime_dir: Path, listen_fd: int | None = None) -> FrontendConfig:
    """What the frontend is told, from the resolved configuration and the model's folder. Raises `ConfigRefused`."""
    try:
        return _frontend_config(config, model, runtime_dir, listen_fd)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigRefused(": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])) from error


def _frontend_config(config: RuntimeConfig, model: Path, runtime_dir: Path, listen_fd: int | None) -> FrontendConfig:
    return FrontendConfig(
        model=str(model),
        runtime_dir=str(runtime_dir),
        served_model_name=(config.served_model_name or config.model,),
        tokenizer=config.tokenizer,
        chat_template=config.chat_template,
        generation_config=config.generation_config,
        max_loops=config.max_loops,
        exit_thresholds=config.exit_thresholds,
        reasoning_parser=config.reasoning_parser or "auto",
        tool_call_parser=config.tool_call_parser or "auto",
        listen_fd=listen_fd,
        host=config.host,
        port=config.port,
        api_keys=() if config.api_key is None else (config.api_key,),
        cors_origins=config.cors_origins,
        log_level=config.log_level,
        max_request_bytes=config.max_request_bytes,
        max_image_request_bytes=config.max_image_request_bytes,
        max_queue=config.max_queue,
        image_url_hosts=config.image_url_hosts,
        image_dir=config.image_dir,
        max_images=config.max_images,
        max_image_bytes=config.max_image_bytes,
        max_image_pixels=config.max_image_pixels,
        image_memory_bytes=config.image_memory_bytes,
        drain_seconds=max(config.drain_timeout, 0.1),
        ready_bound_seconds=config.command_timeout,
    )


class Frontend:
    """One frontend process at a time, each watched until it ends; `on_end` is called for each.

    What it is told goes through a queue that never blocks. A new process gets a queue of its own, which begins with the last
    EpochEnded if no epoch has run since: the engine's own announcements tell it of one that runs. A process had come up, so that
    its end is no failed start, when it has printed `ready`, or lived for `STEADY_SECONDS`.
    """

    def __init__(
        self, loop: Loop, module: str, config: FrontendConfig, listener: socket.socket, on_end: Callable[[FrontendEnded], None]
    ) -> None:
        self._loop = loop
        self._module = module
        self._listener = listener
        self._on_end = on_end
        self._address = f"ipc://{config.runtime_dir}/frontend"
        self._path = Path(config.runtime_dir) / "frontend.json"
        self._path.touch(mode=0o600)
        self._path.write_text(json.dumps(config.model_dump(mode="json"), indent=2), encoding="utf-8")
        self._context = zmq.Context()
        self._outbox: zmq.Socket[bytes] | None = None
        self._state: EpochEnded | None = None
        self._child: Child | None = None
        self._output = -1
        self._line = b""
        self._reason = ""
        self._ready = False
        self._began = 0.0
        self._ending = False

    @property
    def alive(self) -> bool:
        """A process runs, or its end has not been seen yet."""
        return self._child is not None

    def start(self) -> None:
        """Start a process; one that the system does not give has ended at once."""
        self._line, self._reason, self._ready, self._began = b"", "", False, time.monotonic()
        self._renew_outbox()
        self._output, theirs = os.pipe()
        os.set_blocking(self._output, False)
        self._loop.watch(self._output, self._pass_output)
        arguments = ["--config-json", str(self._path)]
        try:
            self._child = Child("frontend", self._module, arguments, pass_fds=[self._listener.fileno()], stdout=theirs)
        except OSError as error:
            self._close_output()
            ended = FrontendEnded(f"it could not be started: {error}")
            self._loop.later(0.0, lambda: self._on_end(ended))
            return
        finally:
            os.close(theirs)
        self._loop.watch(self._child.pidfd, self._ended)

    def tell(self, message: EpochEnded | Recovered) -> None:
        """Queue a message for this process, and for the next one if it says how things are."""
        self._state = message if isinstance(message, EpochEnded) else None
        if self._outbox is not None:
            self._send(message)

    def end(self, grace: float) -> None:
        """SIGTERM now, so that it drains; SIGKILL after `grace` seconds. No other is started."""
        self._ending = True
        child = self._child
        if child is not None:
            child.send(signal.SIGTERM)
            self._loop.later(grace, lambda: child.send(signal.SIGKILL))

    def close(self) -> None:
        """Release what is held; a process that still runs ends with this one."""
        if self._outbox is not None:
            self._outbox.close(linger=0)
            self._outbox = None
        self._context.term()
        self._listener.close()

    def _renew_outbox(self) -> None:
        if self._outbox is not None:
            self._outbox.close(linger=0)  # with what the process before did not read
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set(zmq.SNDHWM, QUEUE_MESSAGES)
        self._outbox.connect(self._address)
        if self._state is not None:
            self._send(self._state)

    def _send(self, message: EpochEnded | Recovered) -> None:
        assert self._outbox is not None
        try:
            self._outbox.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            # It has not read for hundreds of recoveries; when it is replaced, the next one is told how things are.
            self._loop.later(0.0, self._kill_deaf)

    def _kill_deaf(self) -> None:
        if self._child is not None:
            self._child.send(signal.SIGKILL)

    def _pass_output(self) -> None:
        """Hand on what it prints, line by line, except the one that says why it cannot start: that is the end's to tell."""
        try:
            data = os.read(self._output, 65536)
        except BlockingIOError:
            return
        if not data:
            self._close_output()
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._take_line(line)
        if len(self._line) > LONGEST_LINE:
            self._hand_on(self._line)
            self._line = b""

    def _take_line(self, line: bytes) -> None:
        if line.startswith(REFUSED_LINE):
            self._reason = line.removeprefix(REFUSED_LINE).decode(errors="replace")
            return
        self._ready = self._ready or line == READY_LINE
        self._hand_on(line + b"\n")

    def _hand_on(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads this process's own output: no reason to end
            os.write(STDOUT, data)

    def _close_output(self) -> None:
        if self._output >= 0:
            self._hand_on(self._line)
            self._line = b""
            self._loop.forget(self._output)
            os.close(self._output)
            self._output = -1

    def _ended(self) -> None:
        assert self._child is not None
        self._loop.forget(self._child.pidfd)
        how = self._child.reap()
        self._child = None
        if self._output >= 0:
            self._pass_output()
            self._close_output()
        if self._ending:
            self._listener.close()  # nobody will take what would wait there
        ready = self._ready or time.monotonic() - self._began >= STEADY_SECONDS
        told = f"{how}: {self._reason}" if self._reason else str(how)
        self._on_end(FrontendEnded(told, ready=ready, refused=how.status == REFUSED_STATUS))
