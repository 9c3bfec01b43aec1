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
    assert len(compiled) == 14
    for name, reader, pause, ptx, ir in compiled[:-1]:
        about = f"{name} {reader} {pause}"
        atomics = [line for line in ptx.splitlines() if "atom." in line]
        releases = [line for line in atomics if "atom.global.sys.release.exch.b32" in line]
        # One peer: it is told once a shot, and one more atomic operation ends a wait, or two are the reads of it.
        shots = 2 if name == "two shots" else 1
        assert len(releases) == shots, about
        assert len(atomics) - len(releases) == shots * {"warps": 1, "thread": 0, "atomic": 2}[reader], about
        assert re.search(r"\.acquire\.", ptx), about
        assert not re.search(r"ld\.global\S*\.b16", ptx), f"{about}: rows are not read 16 bytes at a time"
        assert ("nanosleep" in ptx) == (pause > 0), about
        if name == "two shots":
            assert_shots_are_in_order(ir, about)
            continue
        lines = ir.splitlines()
        rows = [place for place, line in enumerate(lines) if re.search(r"tt\.(load|store) .*tensor<.*ptr<bf16>", line)]
        barriers = [place for place, line in enumerate(lines) if "barrier" in line]
        (told,) = [place for place, line in enumerate(lines) if re.search(r"tt\.atomic_rmw exch, release, sys", line)]
        heard = max(place for place, line in enumerate(lines) if re.search(r"tt\.atomic_rmw \w+, acquire, sys", line))
        assert [place for place in rows if place < told][-1] < barriers[0] < told < heard, about
        # Meanwhile nothing but the next tile of the rank's own: as many reads as before the first.
        own = {"sum": 1, "choices": 8, "gather": 0}[name]
        assert len([place for place in rows if told < place < barriers[-1]]) == own, about
        assert heard < barriers[-1] < rows[-1], about
    name, _, _, ptx, _ = compiled[-1]
    assert name == "words"
    assert_words_are_whole([line.strip() for line in ptx.splitlines()])


def assert_shots_are_in_order(ir: str, about: str) -> None:
    """Rows are written, then told of, with a barrier between; heard of, then read: a part, its sum, and the sum of another's."""
    kinds = {
        "load": r"tt\.load .*tensor<.*ptr<bf16>",
        "store": r"tt\.store .*tensor<.*ptr<bf16>",
        "barrier": "barrier",
        "tell": r"tt\.atomic_rmw exch, release, sys",
        "hear": r"tt\.atomic_rmw \w+, acquire, sys",
    }
    found = [kind for line in ir.splitlines() for kind, pattern in kinds.items() if re.search(pattern, line)]
    order = " ".join(kind for place, kind in enumerate(found) if kind != "hear" or found[place - 1] != "hear")
    assert re.fullmatch(
        "load store barrier tell load hear barrier load store barrier tell( load| store)+ hear barrier load( load| store)+", order
    ), f"{about}: {order}"


def assert_words_are_whole(lines: list[str]) -> None:
    """Data and number go together, two words at a time, after the launch before is done; nothing fences, signals or is replaced."""
    (waited,) = [place for place, line in enumerate(lines) if "griddepcontrol.wait" in line]
    (let_go,) = [place for place, line in enumerate(lines) if "griddepcontrol.launch_dependents" in line]
    written = [place for place, line in enumerate(lines) if "st.global.v2.b64" in line]
    read = [place for place, line in enumerate(lines) if "ld.volatile.global.v2.b64" in line]
    stores = [place for place, line in enumerate(lines) if "st.global" in line]
    assert written
    assert read
    assert waited < let_go < stores[0]
    assert stores[: len(written)] == written
    assert written[-1] < read[0] <= read[-1] < stores[len(written)]
    assert not [line for line in lines if "atom." in line or "membar" in line or "fence" in line]
    assert not [line for line in lines if re.search(r"(ld\.volatile|st)\.global\S*\.b64", line) and "v2" not in line]
