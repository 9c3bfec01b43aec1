"""What the sums through peer memory are compiled to for sm_90: their order in memory is kept, and the host's word is only read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.python_path import python_path


def test_every_way_of_waiting_is_compiled_in_order(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-W", "ignore", "-m", "tests.unit.kernels.one_shot_ahead"]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout)
    assert len(compiled) == 10
    for name, reader, pause, ptx in compiled:
        about = f"{name} {reader} {pause}"
        lines = [line.strip() for line in ptx.splitlines()]
        atomics = [line for line in lines if "atom." in line]
        releases = [place for place, line in enumerate(lines) if "atom.global.sys.release.exch.b32" in line]
        acquires = [place for place, line in enumerate(lines) if re.search(r"\.acquire\.", line)]
        rows = [place for place, line in enumerate(lines) if "ld.global.v4.b32" in line]
        # One peer: it is told once, and one more atomic operation ends a wait, or two are the reads of it.
        assert len(releases) == 1, about
        assert len(atomics) - len(releases) == {"warps": 1, "thread": 0, "atomic": 2}[reader], about
        assert acquires, about
        assert rows[0] < releases[0] < acquires[0] < rows[-1], about
        assert not re.search(r"ld\.global\S*\.b16", ptx), f"{about}: rows are not read 16 bytes at a time"
        assert ("nanosleep" in ptx) == (pause > 0), about
