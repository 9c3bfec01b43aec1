"""What scatters and gathers of owned rows are compiled to for sm_90: their order in memory is kept, and registers suffice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.python_path import python_path

WORLDS = (2, 8)

SPILLED = 64
"""Most bytes of a thread's stack that two ranks' kernels may take, whose programs are three a multiprocessor; others take none."""


def test_rows_are_shown_before_they_are_told_of_and_read_after_they_are_heard_of(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-W", "ignore", "-m", "tests.unit.kernels.owned_rows_ahead"]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout)
    names = ["owned_scatter_words_kernel", "owned_gather_words_kernel", "owned_scatter_kernel", "owned_gather_kernel"]
    assert [each["name"] for each in compiled] == names * len(WORLDS)
    for number, each in enumerate(compiled):
        world = WORLDS[number // len(names)]
        about = f"{each['name']} of {world}"
        assert each["stack"] <= (SPILLED if world == 2 else 0), about
        if "words" in each["name"]:
            assert_words_are_whole([line.strip() for line in each["ptx"].splitlines()], world - 1, about)
        else:
            assert_tiles_are_in_order(each["ir"], each["ptx"], world - 1, about)


def assert_words_are_whole(lines: list[str], peers: int, about: str) -> None:
    """Data and number go together, two words at a time, after the launch before is done; nothing fences, signals or is replaced."""
    (waited,) = [place for place, line in enumerate(lines) if "griddepcontrol.wait" in line]
    (let_go,) = [place for place, line in enumerate(lines) if "griddepcontrol.launch_dependents" in line]
    written = [place for place, line in enumerate(lines) if "st.global.v2.b64" in line]
    read = [place for place, line in enumerate(lines) if "ld.volatile.global.v2.b64" in line]
    stores = [place for place, line in enumerate(lines) if "st.global" in line]
    assert len(written) == len(read) > 0, about
    assert len(written) % peers == 0, about
    assert waited < let_go < stores[0], about
    assert written[-1] < read[0], about
    assert not [line for line in lines if "atom." in line or "membar" in line or "fence" in line], about
    assert not [line for line in lines if re.search(r"(ld\.volatile|st)\.global\S*\.b64", line) and "v2" not in line], about


def assert_tiles_are_in_order(ir: str, ptx: str, peers: int, about: str) -> None:
    """Rows for peers, a barrier, every peer told; the next tile read; every peer heard, a barrier, rows read."""
    assert not re.search(r"ld\.global\S*\.b16", ptx), f"{about}: rows are not read 16 bytes at a time"
    kinds = {
        "load": r"tt\.load .*tensor<.*ptr<bf16>",
        "store": r"tt\.store .*tensor<.*ptr<bf16>",
        "barrier": "barrier",
        "tell": r"tt\.atomic_rmw exch, release, sys",
        "hear": r"tt\.atomic_rmw \w+, acquire, sys",
    }
    found = [kind for line in ir.splitlines() for kind, pattern in kinds.items() if re.search(pattern, line)]
    order = " ".join(kind for place, kind in enumerate(found) if kind != "hear" or found[place - 1] != "hear")
    shown = f"((load|store) )+(store ){{{peers}}}barrier" + " tell" * peers
    assert re.fullmatch(f"{shown}( load| store)+( hear)+ barrier load( load| store)*", order), f"{about}: {order}"
