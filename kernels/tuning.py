"""Kernel configurations as data: `kernels/tuned/<device>.json`, made by a benchmark on that device, read once.

A file holds `{"device": name, "entries": [{"kernel": name, "shape": {name: value}, "rows": {"1": {...}, "8": {...}}}]}`: for each
kernel and shape, configurations by number of rows. What a configuration holds is between the kernel and its benchmark.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tuned"

Shape = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class Entry:
    """Configurations of one kernel and shape: `configs[i]` was tuned for `rows[i]` rows; rows ascend."""

    kernel: str
    shape: dict[str, int | str]
    rows: tuple[int, ...]
    configs: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class TuningTable:
    """All entries of one device. `digest` is of the file's bytes: ranks whose tables differ may launch different collectives."""

    device: str
    entries: tuple[Entry, ...]
    digest: str = ""

    def find(self, kernel: str, shape: Shape, rows: int) -> dict[str, Any] | None:
        """The configuration of the fewest tuned rows that hold `rows`, else of the most; None for an unknown shape."""
        for entry in self.entries:
            if entry.kernel == kernel and entry.shape == shape:
                return entry.configs[min(bisect_left(entry.rows, rows), len(entry.rows) - 1)]
        return None


class Tuning:
    """A table, and the shapes that it lacked: each is reported once, in words."""

    def __init__(self, table: TuningTable, missing: Callable[[str], None]) -> None:
        self._table, self._missing = table, missing
        self._reported: set[str] = set()

    def find(self, kernel: str, shape: Shape, rows: int) -> dict[str, Any] | None:
        """As `TuningTable.find`."""
        found = self._table.find(kernel, shape, rows)
        if found is None:
            message = f"{kernel} is not tuned on {self._table.device} for {json.dumps(dict(shape))}: default configuration"
            if message not in self._reported:
                self._reported.add(message)
                self._missing(message)
        return found


def table_path(device: str, folder: Path = FOLDER) -> Path:
    """Where the table of a device of this name is: `NVIDIA H200` -> `nvidia_h200.json`."""
    return folder / (re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json")


def load_table(device: str, folder: Path = FOLDER) -> TuningTable:
    """The table of a device, empty where there is no file. Raises ValueError, naming the file, for one that is malformed."""
    path = table_path(device, folder)
    if not path.exists():
        return TuningTable(device, ())
    try:
        content = path.read_bytes()
        plain = json.loads(content)
        digest = blake2b(content, digest_size=16).hexdigest()
        return TuningTable(plain["device"], tuple(_entry(entry) for entry in plain["entries"]), digest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no tuning table: {error!r}") from error


def sums_shape(width: int, world: int, dtype: str) -> dict[str, int | str]:
    """The key of entries for sums over ranks (kernel name `sums`): whose configurations say in "way" `peers` or `nccl`."""
    return {"width": width, "world": world, "dtype": dtype}


def merge_entries(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A file's entries with new ones: a new one takes the place of the old one of its kernel and shape."""
    kept = [entry for entry in old if all((entry["kernel"], entry["shape"]) != (e["kernel"], e["shape"]) for e in new)]
    return [*kept, *new]


def _entry(plain: Mapping[str, Any]) -> Entry:
    tuned = sorted(((int(rows), config) for rows, config in plain["rows"].items()), key=lambda pair: pair[0])
    if not tuned:
        raise ValueError(f"no rows for {plain['kernel']} {plain['shape']}")
    return Entry(plain["kernel"], dict(plain["shape"]), tuple(rows for rows, _ in tuned), tuple(config for _, config in tuned))
