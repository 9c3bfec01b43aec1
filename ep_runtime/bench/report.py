"""What a benchmark prints and writes: a table for people, JSON for everything else, and what was measured on."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ep_runtime.bench.plots import plot_file

PACKAGES = ("ep-runtime", "torch", "triton", "transformers")


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Rows as aligned text. `columns` maps a row's key to the column's title; absent and None values are shown as "-"."""
    cells = [list(columns.values())] + [[_cell(row.get(key)) for key in columns] for row in rows]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells)


def environment() -> dict[str, Any]:
    """Date, command, versions, processors: what a result needs beside it to mean something."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m ep_runtime.bench", *sys.argv[1:]]),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "processor": processor(),
        **{name: _version(name) for name in PACKAGES},
    }


def processor() -> str:
    """The CPU's name, as /proc/cpuinfo gives it; the machine type elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say where a result goes."""
    parser.add_argument("--out", type=Path, help="file for the result as JSON")
    parser.add_argument("--plot", type=plot_file, metavar="FILE.png", help="file for a picture of the result (extra 'bench')")


def write(path: Path | None, result: Mapping[str, Any]) -> None:
    """The result as JSON, if a file is wanted."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    return str(value)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
