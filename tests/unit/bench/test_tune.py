"""`bench tune`: which commands measure what, and what is said where nothing can be measured. Kernels are measured on GPUs alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ep_runtime.bench import few_rows, kernels, layer_kernels
from ep_runtime.bench.__main__ import main
from ep_runtime.bench.tune import PARTS, commands


def test_every_part_writes_into_the_same_table() -> None:
    table, results = Path("tuned/x.json"), Path("out")
    found = {part: commands(part, "30b,80b-ep2", table, results, 4) for part in PARTS}
    assert [len(each) for each in found.values()] == [1, 1, 2]
    assert all(each[-1][-2:] == ["--table", str(table)] for each in found.values())
    assert "30b,80b-ep2" in found["experts"][0]
    first, second = found["sums"]
    assert first[first.index("--nproc-per-node") + 1] == "4"
    assert first[-1] == second[4] == str(results / "sums.json")


@pytest.mark.parametrize(("module", "part"), [(kernels, "experts"), (few_rows, "few_rows")])
def test_the_parts_take_these_flags(module: object, part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their own parsers know every flag: they go on to the first thing that is compiled."""
    (command,) = commands(part, "30b", tmp_path / "x.json", tmp_path, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("sys.argv", [*command[3:4], *command[4:]])
    monkeypatch.setattr(module, "ProcessPoolExecutor", _reached)
    with pytest.raises(_Reached):
        module.main()  # type: ignore[attr-defined]


class _Reached(Exception):
    pass


def _reached(*_: object, **__: object) -> None:
    raise _Reached


@pytest.mark.parametrize(("flags", "said"), [(["--parts", "experts,heads"], "heads; known are"), ([], "there is none here")])
def test_what_cannot_be_measured_is_told(flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=said):
        main(["tune", *flags])


@pytest.mark.parametrize(("module", "flags"), [(kernels, ["experts"]), (few_rows, []), (layer_kernels, [])])
def test_without_a_gpu_nothing_is_compiled(module: object, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench", *flags])
    with pytest.raises(SystemExit, match="there is none here"):
        module.main()  # type: ignore[attr-defined]
