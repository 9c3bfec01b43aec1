"""Lists of kernels, kept beside the kernels in Triton's cache: a later start of the same model needs no process to make one."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import msgspec

from ep_runtime.engine.ahead.job import Job, Variant

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[3]
SOURCES = ("kernels", "model", "ep_runtime/engine")
"""Whatever the list follows from, beside the job, the model's configuration, and the versions of libraries."""

ELSEWHERE = {"folder": "", "processes": 0, "local_rank": 0, "local_ranks": 0}
"""What does not matter for the list."""


@cache
def sources_digest() -> bytes:
    """Of the code and the tuned configurations."""
    digest = blake2b("/".join(version(name) for name in ("torch", "triton")).encode(), digest_size=16)
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


def list_path(job: Job, folder: Path) -> Path:
    """Where the list of a job is kept in the cache's folder."""
    digest = blake2b(sources_digest(), digest_size=16)
    digest.update(msgspec.json.encode(msgspec.structs.replace(job, **ELSEWHERE)))
    digest.update((Path(job.folder) / "config.json").read_bytes())
    return folder / f"ep_runtime-{digest.hexdigest()}.jsonl"


def keep(path: Path, variants: Sequence[Variant]) -> None:
    """Write the list, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_bytes(b"".join(msgspec.json.encode(variant) + b"\n" for variant in variants))
    beside.replace(path)


def kept(path: Path) -> list[Variant] | None:
    """The list; None where there is none that can be read."""
    try:
        return [msgspec.json.decode(line, type=Variant) for line in path.read_bytes().splitlines()]
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        log.warning("%s is made anew: %s", path, error)
        return None
