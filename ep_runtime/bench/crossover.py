"""Which way a sum over ranks goes, as entries of a tuning table: `python -m ep_runtime.bench.crossover RESULT.json --table FILE`.

RESULT.json is what `bench collectives` or `bench scale` has written on GPUs; the entries join those that FILE has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.tuning import merge_entries, sums_shape

NCCL, PEERS = "nccl, eager", "default"
"""Variants of `bench collectives`."""


def crossover(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The entry that a result of `bench collectives` makes: by rows, the faster way of a sum; None when it has not both ways."""
    times = {(row["collective"], row["variant"], row["rows"]): row["median_us"] for row in result["rows"]}
    counts = sorted({rows for _, _, rows in times})
    ways = {}
    for rows in counts:
        nccl, peers = times.get(("reduce", NCCL, rows)), times.get(("reduce_rows", PEERS, rows))
        if nccl is not None and peers is not None:
            ways[str(rows)] = {"way": "nccl" if nccl < peers else "peers", "nccl_us": round(nccl, 2), "peers_us": round(peers, 2)}
    shape = sums_shape(result["width"], result["ranks"], "bfloat16")
    return {"kernel": "sums", "shape": shape, "rows": ways} if ways else None


def tables_of(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The results of `bench collectives` in a result of it, or of `bench scale`."""
    found: Sequence[Mapping[str, Any]] = result["collectives"] if result["benchmark"] == "scale" else [result]
    return [table for table in found if "failed" not in table]


def main(argv: list[str] | None = None) -> None:
    """Put the entries of all results into the table."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.bench.crossover", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--table", type=Path, required=True, help="of kernels/tuned/")
    options = parser.parse_args(argv)
    table = json.loads(options.table.read_text(encoding="utf-8"))
    for path in options.results:
        for found in tables_of(json.loads(path.read_text(encoding="utf-8"))):
            entry = crossover(found)
            if entry is None or found["device"] != table["device"]:
                raise SystemExit(f"{path} has no sums over GPUs of the kind of {options.table}, {table['device']}")
            table["entries"] = merge_entries(table["entries"], [entry])
            ways = ", ".join(f"{rows} rows {way['way']}" for rows, way in entry["rows"].items())
            print(f"{found['ranks']} ranks: {ways}")
    options.table.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
