"""Benchmarks start where only the runtime is installed: what the demos and tests need besides is not there."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.python_path import python_path

SCRIPT = """
import sys
for name in ("openai", "gguf", "transformers", "pytest", "hypothesis", "matplotlib"):
    sys.modules[name] = None
import ep_runtime.bench.__main__
"""


def test_every_benchmark_is_there_without_extras():
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
