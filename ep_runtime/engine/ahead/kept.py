"""Lists of kernels, kept beside the kernels in Triton's cache: a later start of the same model needs no steps to make one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import NamedTemporaryFile

import msgspec
import torch

from ep_runtime.engine.ahead.job import Job, Variant

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[3]
SOURCES = ("kernels", "model", "ep_runtime/engine")
"""Whatever the list follows from, beside the job, the model's configuration, and the versions of libraries."""

ELSEWHERE = {"folder": "", "processes": 0, "local_rank": 0, "local_ranks": 0}
"""What does not matter for the list."""


@cache
def sources_digest() -> str:
    """Of the code and the tuned configurations, in hexadecimal digits."""
    import triton

    digest = blake2b(f"{torch.__version__}/{triton.__version__}".encode(), digest_size=8)
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def list_path(job: Job, folder: Path) -> Path:
    """Where the list of a job is kept in the cache's folder. Raises OSError if the model has no configuration to be read."""
    digest = blake2b(msgspec.json.encode(msgspec.structs.replace(job, **ELSEWHERE)), digest_size=8)
    digest.update((Path(job.folder) / "config.json").read_bytes())
    return folder / f"ep_runtime-{digest.hexdigest()}-{sources_digest()}.jsonl"


def keep(path: Path, variants: Sequence[Variant]) -> None:
    """Write the list, all of it or nothing, in the place of those of the same job and older sources. A fault is a warning."""
    beside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
            beside = Path(file.name)
            file.write(b"".join(msgspec.json.encode(variant) + b"\n" for variant in variants))
        beside.replace(path)
        for old in path.parent.glob(f"{path.name.rpartition('-')[0]}-*.jsonl"):
            if old != path:
                old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("the next start lists its kernels again: %s", error)
        if beside is not None:
            beside.unlink(missing_ok=True)


def cached(variant: Variant) -> bool:
    """Whether Triton's cache has the compiled kernel. Raises OSError if the cache cannot be used."""
    from triton.runtime.cache import get_cache_manager

    return bool(variant.hash) and get_cache_manager(variant.hash).get_group(f"{variant.name}.json") is not None


def kept(path: Path) -> list[Variant] | None:
    """The list; None where there is none that can be read."""
    try:
        return [msgspec.json.decode(line, type=Variant) for line in path.read_bytes().splitlines()]
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        log.warning("%s is made anew: %s", path, error)
        return None
