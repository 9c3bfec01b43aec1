"""One rank of `startup`: loads a model and, on rank 0, writes when it was where.

`python -m ep_runtime.bench.startup_rank MODEL SETTINGS OUT`, started by `startup`. Times are of
`time.perf_counter`, which is one clock for all processes of a host.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    """Import, load, write. The other ranks' processes end in the constructor."""
    began = time.perf_counter()
    from ep_runtime.bench.session import MeasuredLLM

    imported = time.perf_counter()
    model, settings, out = sys.argv[1:]
    with MeasuredLLM(model, **json.loads(settings)) as llm:
        ready = time.perf_counter()
        seen = {"began": began, "imported": imported, "ready": ready}
        seen |= {"load": llm.load_report.seconds, "compile": llm.compile_seconds, "capture": llm.warm_seconds}
        Path(out).write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
