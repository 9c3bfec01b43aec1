"""The compiling process and its workers: one job in, by standard input, and what they have compiled out, by standard output."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any, BinaryIO

import msgspec

from ep_runtime.engine.ahead.job import Job, Variant

log = logging.getLogger(__name__)

STDIN, STDOUT, STDERR = 0, 1, 2


def begin() -> tuple[Job, BinaryIO]:
    """The job, and where its answer goes: to standard output alone, while what is printed goes to standard error.

    From here on this process ends when its standard input does.
    """
    answer = os.fdopen(os.dup(STDOUT), "wb")
    os.dup2(STDERR, STDOUT)
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    end_with_input()
    return job, answer


def end_with_input() -> None:
    """End this process when its standard input ends, whose other end is the engine's: however that ends, it is closed then."""

    def watch() -> None:
        while os.read(STDIN, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def begin_worker(answer: int) -> None:
    """A worker ends with the engine, too. It lets go of the answer's pipe, so that the engine sees the process that answers end."""
    os.close(answer)
    end_with_input()


def compile_variant(variant: Variant, finish: Callable[[Any], object]) -> Variant | str:
    """Compile one into the cache, or find it there; `finish` takes it. The variant with its place in the cache, or what failed."""
    try:
        compiled = getattr(import_module(variant.module), variant.name).preload(variant.data)
        finish(compiled)
        return msgspec.structs.replace(variant, hash=compiled.hash)
    except Exception as error:
        return f"{variant.name}: {error!r}"


def compile_all(found: Sequence[Variant], processes: int, finish: Callable[[Any], object], answer: BinaryIO) -> list[Variant]:
    """Compile in at most so many processes, which are copies of this one; those that were compiled.

    Raises BrokenProcessPool when a process dies.
    """
    if not found:
        return []
    fork = multiprocessing.get_context("fork")
    workers = min(processes, len(found))
    with ProcessPoolExecutor(workers, fork, initializer=begin_worker, initargs=(answer.fileno(),)) as pool:
        results = list(pool.map(partial(compile_variant, finish=finish), found))
    for fault in results:
        if isinstance(fault, str):
            log.warning("not compiled ahead: %s", fault)
    return [variant for variant in results if isinstance(variant, Variant)]


def reply(answer: BinaryIO, compiled: Sequence[Variant]) -> None:
    """Answer, and be done."""
    with answer:
        answer.write(b"".join(msgspec.json.encode(variant) + b"\n" for variant in compiled))
