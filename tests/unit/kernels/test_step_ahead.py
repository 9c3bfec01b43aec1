"""What the attention of decode steps is compiled to for sm_90: the cache is read before the wait for the projection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.python_path import python_path


def test_keys_and_values_are_asked_for_before_the_wait(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-W", "ignore", "-m", "tests.unit.kernels.step_ahead"]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for ptx in json.loads(done.stdout):
        lines = [line.strip() for line in ptx.splitlines()]
        copies = [place for place, line in enumerate(lines) if line.startswith("cp.async.cg.shared.global")]
        waits = [place for place, line in enumerate(lines) if line.startswith("griddepcontrol.wait")]
        triggers = [place for place, line in enumerate(lines) if line.startswith("griddepcontrol.launch_dependents")]
        stores = [place for place, line in enumerate(lines) if "st.global" in line]
        assert copies, "tiles are not copied asynchronously, 16 bytes at a time"
        assert copies[0] < waits[0]
        # Two ways, of an idle row and of any other; each triggers behind its own wait, and nothing is stored before.
        assert len(waits) == len(triggers) == 2
        assert all(wait < trigger for wait, trigger in zip(waits, triggers, strict=True))
        assert waits[0] < stores[0]
