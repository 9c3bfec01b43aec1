"""The engine process with faults that a test arms: `serve` runs this module in the place of `ep_runtime.engine.main`.

Everything meets in the folder that CHAOS_DIR names. A fault is armed by a file `KIND-RANK` with its arguments as JSON; the engine
that meets it takes the file away, so that it happens once, whichever process the rank has by then. What happens is told by
datagrams to `events` there. The kinds:

    load      after "loading" was told, wait to be killed before any weight is read
    form      wait to be killed while the epoch is being formed
    prepare   raise in the next forward's prepare        {"marker": [ids]}: in the next one whose tokens hold these in a row
    execute   raise in the next forward's execute        {"marker": ..., "late": true}: after it has run
    poison    in every execute with the marker, for the file stays: {"how": "raise", "crash" or "hang"}
    picture   on the head in every pass over an image of one color, likewise: {"color": [r, g, b], "how": ...}
    encode    on the head wait to be killed in the midst of a pass over images; {"wait": false}: only tell
    shown     wait to be killed after a forward, when a slot still holds rows of images: in the midst of their prompt
    digest    tell that the ranks were compared while a slot held rows of images
    slow      sleep for {"seconds": S} in the next prefill
    corrupt   on the head flip a bit of the next frame, on a worker of the next ack
    close     on a worker close the link before the next ack
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ep_runtime.engine import main as engine
from ep_runtime.engine.executor import Executor
from model.vision.patches import ImagePixels
from model.vision.tower import Encoding, VisionTower
from protocol.ack import pack_ack
from protocol.commands import Digest, Forward
from protocol.frame import Frame
from protocol.links import HeadLinks, WorkerLink
from protocol.slots import SlotTable

LASTING = ("poison", "picture")
"""Faults that happen until the test takes them back."""


class Armed(Exception):
    """The fault that a test armed."""


class Faults:
    """The armed faults of this process's rank."""

    def __init__(self, folder: Path) -> None:
        self.rank = -1
        self._folder = folder
        self._events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def tell(self, what: str, **more: Any) -> None:
        """Say to the test what happens here; nobody listens any more when it has ended."""
        event = {"what": what, "rank": self.rank, "pid": os.getpid(), **more}
        with suppress(OSError):
            self._events.sendto(json.dumps(event).encode(), str(self._folder / "events"))

    def take(self, kind: str, fits: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any] | None:
        """The arguments of a fault of this kind that is armed and fits; it is over with that, unless it lasts."""
        path = self._folder / f"{kind}-{self.rank}"
        if not path.exists():
            return None
        arguments: dict[str, Any] = json.loads(path.read_text())
        if not fits(arguments):
            return None
        if kind not in LASTING:
            path.unlink()
        self.tell(kind)
        return arguments

    def stop_here(self, kind: str) -> None:
        """Wait for the test's SIGKILL if it armed that."""
        armed = self.take(kind)
        if armed is not None and armed.get("wait", True):
            threading.Event().wait()


def arm(folder: Path, kind: str, rank: int, arguments: dict[str, Any]) -> None:
    """Arm a fault: all of it is there at once, for an engine that looks just now."""
    draft = folder / f"draft-{kind}-{rank}"
    draft.write_text(json.dumps(arguments))
    draft.rename(folder / f"{kind}-{rank}")


def holds(frame: Frame, marker: Sequence[int] | None) -> bool:
    """Whether the frame is a forward whose tokens hold `marker` in a row; any forward will do without one."""
    if not isinstance(frame.command, Forward):
        return False
    if marker is None:
        return True
    windows = len(frame.tokens) - len(marker) + 1
    return windows > 0 and any(np.array_equal(frame.tokens[at : at + len(marker)], marker) for at in range(windows))


def arrange(faults: Faults) -> None:
    """Put the faults into the engine's classes, and its start and its epochs under their eyes."""
    _break_executor(faults)
    _break_links(faults)
    _break_tower(faults)
    load_rank, open_head, open_worker, run = engine.load_rank, engine.open_head, engine.open_worker, engine.Engine.run

    def stand(self: engine.Engine) -> None:
        faults.rank = self._device_index  # on one host the rank that it will have
        faults.tell("stands")
        run(self)

    def load(config: Any, parallel: Any, *args: Any, **kwargs: Any) -> Any:
        faults.rank = parallel.rank
        faults.tell("loading")
        faults.stop_here("load")
        return load_rank(config, parallel, *args, **kwargs)

    def head(*args: Any, **kwargs: Any) -> Any:
        faults.stop_here("form")
        return open_head(*args, **kwargs)

    def worker(*args: Any, **kwargs: Any) -> Any:
        faults.stop_here("form")
        return open_worker(*args, **kwargs)

    engine.load_rank, engine.open_head, engine.open_worker = load, head, worker
    engine.Engine.run = stand  # type: ignore[method-assign]


def _break_executor(faults: Faults) -> None:
    prepare, execute = Executor.prepare, Executor.execute

    def faulty_prepare(self: Executor, frame: Frame, *args: Any, **kwargs: Any) -> Any:
        if faults.take("prepare", lambda given: holds(frame, given.get("marker"))) is not None:
            raise Armed("armed in prepare")
        return prepare(self, frame, *args, **kwargs)

    def faulty_execute(self: Executor, frame: Frame, change: Any, slots: SlotTable, *args: Any) -> None:
        slow = faults.take("slow", lambda _: isinstance(frame.command, Forward) and any(s.length > 1 for s in frame.command.spans))
        if slow is not None:
            time.sleep(slow["seconds"])
            faults.tell("awake")
        poison = faults.take("poison", lambda given: holds(frame, given["marker"]))
        if poison is not None:
            _suffer(poison["how"])
        armed = faults.take("execute", lambda given: holds(frame, given.get("marker")))
        if armed is not None and not armed.get("late"):
            raise Armed("armed in execute")
        execute(self, frame, change, slots, *args)
        if armed is not None:
            raise Armed("armed after execute")
        if slots.vision_rows and isinstance(frame.command, Forward):
            faults.stop_here("shown")
        elif slots.vision_rows and isinstance(frame.command, Digest):
            faults.take("digest")

    Executor.prepare = faulty_prepare  # type: ignore[method-assign]
    Executor.execute = faulty_execute  # type: ignore[method-assign]


def _suffer(how: str) -> None:
    if how == "crash":
        signal.raise_signal(signal.SIGSEGV)
    if how == "hang":
        threading.Event().wait()
    raise Armed("poisoned")


def _break_tower(faults: Faults) -> None:
    begin, advance = VisionTower.begin, VisionTower.advance

    def faulty_begin(self: VisionTower, images: Sequence[ImagePixels]) -> Encoding:
        poison = faults.take("picture", lambda given: any(_has_color(image, given["color"]) for image in images))
        if poison is not None:
            _suffer(poison["how"])
        return begin(self, images)

    def faulty_advance(self: VisionTower, encoding: Encoding, layers: int) -> bool:
        over = advance(self, encoding, layers)
        faults.stop_here("encode")
        return over

    VisionTower.begin = faulty_begin  # type: ignore[method-assign]
    VisionTower.advance = faulty_advance  # type: ignore[method-assign]


def _has_color(image: ImagePixels, color: Sequence[int]) -> bool:
    return bool((image.pixels == torch.tensor(color, device=image.pixels.device)).all())


def _break_links(faults: Faults) -> None:
    send, ack = HeadLinks.send, WorkerLink.ack

    def faulty_send(self: HeadLinks, data: bytes, *args: Any, **kwargs: Any) -> None:
        send(self, _flipped(data) if faults.take("corrupt") is not None else data, *args, **kwargs)

    def faulty_ack(self: WorkerLink, given: Any, *args: Any, **kwargs: Any) -> None:
        if faults.take("close") is not None:
            self.close()
        if faults.take("corrupt") is not None:
            self._channel.send_some(_flipped(pack_ack(given)))
            return
        ack(self, given, *args, **kwargs)

    HeadLinks.send = faulty_send  # type: ignore[method-assign]
    WorkerLink.ack = faulty_ack  # type: ignore[method-assign]


def _flipped(data: bytes) -> bytes:
    """One bit is another, in the middle."""
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


if __name__ == "__main__":
    arrange(Faults(Path(os.environ["CHAOS_DIR"])))
    engine.end_process(engine.main())
