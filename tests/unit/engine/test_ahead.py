"""Kernels compiled ahead: every one that steps of any size need is on the list, and a list that does not come is no fault."""

from __future__ import annotations

import json
import logging
import os
import random
import select
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ep_runtime.config import RuntimeConfig
from ep_runtime.engine.ahead import kept as kept_module
from ep_runtime.engine.ahead import start
from ep_runtime.engine.ahead.job import Job, Variant
from ep_runtime.engine.ahead.kept import cached, keep, kept, list_path
from ep_runtime.engine.ahead.pool import compile_all
from ep_runtime.engine.ahead.rows import covering_rows
from ep_runtime.engine.ahead.start import Compiler, compiling, job_for, load_kernels, processes_for
from ep_runtime.engine.graphs import buckets_up_to
from tests.support.python_path import python_path

EVERYWHERE = {"_step_kernel", "_prefill_kernel", "_decode_kernel", "_route_kernel", "_gate_up_kernel", "_down_paired_kernel"}
LINEAR = {"_delta_decode_kernel", "_conv_kernel", "_chunk_kernel", "_state_kernel", "_output_kernel"}
SUMS = {"one_shot_words_kernel", "one_shot_kernel"}
OWNED = {"owned_scatter_words_kernel", "owned_gather_words_kernel", "owned_scatter_kernel", "owned_gather_kernel"}
"""In layout `data`, in place of sums."""


def test_rows_cover_every_kind() -> None:
    """Kinds change at any places; a range is found that holds a power of two, or that no two equal ones enclose."""
    chance = random.Random(3)
    for _ in range(50):
        most = chance.randrange(1, 3000)
        changes = sorted(chance.sample(range(2, 3001), 6))
        chosen = covering_rows(most, lambda rows, changes=changes: bisect_right(changes, rows))
        assert chosen == sorted(set(chosen))
        assert {bisect_right(changes, rows) for rows in chosen} == {bisect_right(changes, rows) for rows in range(1, most + 1)}


def test_rows_of_one_kind_take_few_looks() -> None:
    looks: list[int] = []
    assert covering_rows(8192, lambda rows: looks.append(rows)) == [1]
    assert len(looks) == 14


def test_buckets_are_powers_of_two_and_the_slots() -> None:
    assert [buckets_up_to(slots) for slots in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_processes_leave_a_core_to_each_rank() -> None:
    assert [processes_for(cores, 2**40, ranks) for cores, ranks in ((1, 1), (2, 1), (16, 2), (64, 2), (4, 8))] == [1, 1, 7, 8, 1]


def test_processes_fit_into_a_ranks_share_of_memory() -> None:
    assert [processes_for(64, available, 2) for available in (0, 3 * 2**30, 2**40)] == [1, 3, 8]


def told_by(program: str) -> Any:
    """What a program of these tests prints: it compiles for a GPU, which the suite's processes cannot."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-W", "ignore", "-m", f"tests.unit.engine.{program}"]
    environment |= {"PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_steps_of_any_size_need_no_other_kernel() -> None:
    dense, hybrid = told_by("ahead_steps")
    assert dense["new"] == hybrid["new"] == []
    assert set(dense["names"]) > EVERYWHERE
    assert set(hybrid["names"]) > EVERYWHERE | LINEAR | SUMS
    assert dense["numbers"] == hybrid["numbers"] == [], "these are compiled anew for numbers that are multiples of 16"


def test_serving_launches_nothing_that_is_not_listed() -> None:
    """Waves of requests on each rank, where ranks divide heads and where they divide sequences."""
    found = told_by("ahead_serving")
    assert len(found) == 8
    for each in found:
        about = f"{each['model']}, layout {each['layout']}, rank {each['rank']}"
        moved, others = (OWNED, SUMS) if each["layout"] == "data" else (SUMS, OWNED)
        kinds = EVERYWHERE | moved | (LINEAR if each["model"] == "qwen3-next-80b-a3b" else set())
        drawn = {"_sample_kernel", "_pick_kernel"} if each["rank"] == 0 else set()
        assert set(each["names"]) > kinds | drawn | {"_send_kernel", "_row_kernel"}, about
        assert not others & set(each["names"]), about
        assert each["new"] == [], about


JOB = Job(
    folder="",
    rank=0,
    world=1,
    dtype="bfloat16",
    layout="replicated",
    device="cpu",
    capability=90,
    block_size=16,
    max_slots=1,
    max_rows=16,
    max_model_len=16,
    buckets=[1],
    peers=False,
    processes=1,
    local_rank=0,
    local_ranks=1,
)


def test_without_a_list_kernels_are_compiled_as_they_are_needed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler = Compiler(replace(JOB, folder=str(tmp_path / "gone")))
    with caplog.at_level(logging.WARNING):
        assert compiler.compiled() == []
    assert "could not be compiled ahead" in caplog.text
    compiler.close()
    late = Compiler(JOB)
    assert late.compiled(patience_s=0.0) == []
    late.close()
    with compiling(None) as load_kernels:
        assert load_kernels() == 0


def test_a_list_is_kept_for_the_same_model_and_the_same_steps(tmp_path: Path) -> None:
    for name, content in (("one", "{}"), ("same", "{}"), ("other", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content, encoding="utf-8")
    one, same, other = (replace(JOB, folder=str(tmp_path / name)) for name in ("one", "same", "other"))
    cache = tmp_path / "cache"
    path = list_path(one, cache)
    assert path == list_path(replace(same, processes=7, local_rank=1, local_ranks=2), cache)
    changed = [other, *(replace(one, **change) for change in ({"rank": 1}, {"max_rows": 17}, {"device": "another"}))]
    assert len({path, *(list_path(job, cache) for job in changed)}) == 1 + len(changed)
    assert kept(path) is None
    variants = [Variant(module="kernels.a", name=name, data="{}") for name in ("b", "c")]
    keep(path, variants)
    assert kept(path) == variants
    assert [file.name for file in cache.iterdir()] == [path.name]
    path.write_bytes(b"{")
    assert kept(path) is None


PROGRAM = "tests.unit.engine.ahead_program"
SOON_S = 60.0
"""Fails a test that would wait for ever."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration; Triton's cache is another one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    return tmp_path / "model"


def test_what_is_printed_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    compiler = Compiler(replace(JOB, device="prints", folder="much", max_slots=3, processes=2), PROGRAM)
    answer = compiler.compiled()
    compiler.close()
    assert answer == [Variant(module=PROGRAM, name="prints", data="much", hash="c0ffee")] * 3
    assert capfd.readouterr().err.count("ptxas says much") == 3


@pytest.mark.parametrize(("device", "status"), [("dies", 1), ("kills", -9)])
def test_a_process_that_dies_is_not_waited_for(device: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    """A worker, or the one that answers, whose workers live on."""
    compiler = Compiler(replace(JOB, device=device, max_slots=3, processes=2), PROGRAM)
    assert compiler.compiled(SOON_S) == []
    compiler.close()
    assert f"could not be compiled ahead (status {status})" in caplog.text


def read_soon(pipe: int) -> bytes:
    """What is in a pipe, at the latest when the others have closed it."""
    assert select.select([pipe], [], [], SOON_S)[0], "nothing comes"
    return os.read(pipe, 100)


@pytest.fixture
def hanging(tmp_path: Path) -> tuple[Job, int]:
    """A job whose kernel is never compiled, and the reading end of its pipe."""
    os.mkfifo(tmp_path / "pipe")
    return replace(JOB, device="hangs", folder=str(tmp_path / "pipe")), os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)


def test_workers_end_with_a_compiler_that_is_closed(hanging: tuple[Job, int]) -> None:
    job, pipe = hanging
    compiler = Compiler(job, PROGRAM)
    assert read_soon(pipe) == b"begun"
    compiler.close()
    assert read_soon(pipe) == b""
    os.close(pipe)


@pytest.mark.parametrize("device", ["hangs", "lists"])
def test_all_end_when_the_engine_does(device: str, hanging: tuple[Job, int]) -> None:
    """Its end of their standard input is closed then; nothing else tells them of a SIGKILL."""
    job, pipe = hanging
    command = [sys.executable, "-P", "-m", PROGRAM]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": python_path()}, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(replace(job, device=device)) + b"\n")
            process.stdin.flush()
            assert read_soon(pipe) == b"begun"
            process.stdin.close()
            assert read_soon(pipe) == b""
            assert process.wait(SOON_S) == 1
        finally:
            process.kill()
    os.close(pipe)


def no_program(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(model / "python"))


def no_configuration(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    (model / "config.json").unlink()


def gone_at_once(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    class Gone(subprocess.Popen):
        def __init__(self, _: Any, **settings: Any) -> None:
            super().__init__([sys.executable, "-c", "raise SystemExit(5)"], **settings)
            self.wait()

    monkeypatch.setattr(subprocess, "Popen", Gone)


def no_answer(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    class Talks(subprocess.Popen):
        def __init__(self, _: Any, **settings: Any) -> None:
            super().__init__([sys.executable, "-c", "input(); print('ptxas failed')"], **settings)

    monkeypatch.setattr(subprocess, "Popen", Talks)


@pytest.mark.parametrize(
    ("fault", "told"),
    [(no_program, "No such file"), (no_configuration, "No such file"), (gone_at_once, "status 5"), (no_answer, "not known")],
)
def test_a_start_goes_on_without_a_compiler(
    fault: Callable[..., None], told: str, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fault(monkeypatch, model)
    with compiling(replace(JOB, folder=str(model))) as load:
        assert load() == 0
    assert told in caplog.text


def test_a_list_that_cannot_be_kept_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").touch()
    keep(tmp_path / "cache" / "list.jsonl", [Variant(module="kernels.a", name="b", data="{}")])
    assert "lists its kernels again" in caplog.text


def test_a_new_list_takes_the_place_of_those_of_older_sources(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = model / "cache"
    job, variants = replace(JOB, folder=str(model)), [Variant(module="kernels.a", name="b", data="{}")]
    other = list_path(replace(job, rank=1), cache)
    for path in (list_path(job, cache), other):
        keep(path, variants)
    monkeypatch.setattr(kept_module, "sources_digest", lambda: "changed")
    path = list_path(job, cache)
    keep(path, variants)
    assert sorted(cache.iterdir()) == sorted([path, other])


def test_a_kernel_that_cannot_be_loaded_is_left_to_its_first_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def preload(data: str) -> SimpleNamespace:
        if data == "bad":
            raise RuntimeError("another target")
        return SimpleNamespace(run=print)

    monkeypatch.setattr(start, "kernel", SimpleNamespace(preload=preload), raising=False)
    variants = [Variant(module=start.__name__, name="kernel", data=data) for data in ("good", "bad", "good")]
    assert load_kernels([*variants, Variant(module="kernels.gone", name="gone", data="")]) == 2
    assert "another target" in caplog.text
    assert "kernels.gone" in caplog.text


@pytest.mark.parametrize("there", [True, False])
def test_a_list_whose_kernels_are_gone_is_compiled_by_processes(there: bool, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the process takes the list as it is: steps of this model would be a fault."""
    import triton
    from triton.runtime.cache import get_cache_manager

    from ep_runtime.engine.ahead.main import listed

    started: list[Job] = []

    def compiler(job: Job) -> SimpleNamespace:
        started.append(job)
        return SimpleNamespace(compiled=list, close=lambda: None)

    monkeypatch.setattr(start, "Compiler", compiler)
    monkeypatch.setattr(start, "load_kernels", len)
    job, cache = replace(JOB, folder=str(model)), Path(triton.knobs.cache.dir)
    variants = [
        Variant(module="kernels.a", name=name, data="{}", hash=digest) for name, digest in (("b", "0b" * 32), ("c", "0c" * 32))
    ]
    for variant in variants[: 2 if there else 1]:
        manager = get_cache_manager(variant.hash)
        name = f"{variant.name}.json"
        manager.put_group(name, {name: manager.put("{}", name)})
    assert [cached(variant) for variant in variants] == [True, there]
    keep(list_path(job, cache), variants)
    with compiling(job) as load:
        assert load() == (2 if there else 0)
    assert started == ([] if there else [job])
    assert listed(job, cache) == variants


def test_the_setting_bounds_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from model.decoder import Decoder

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(start, "processes_for", lambda *_: 5)
    parallel = SimpleNamespace(rank=0, world=1)
    prepared: Any = SimpleNamespace(device=torch.device("cuda"), parallel=parallel, module=object.__new__(Decoder))
    needs: Any = SimpleNamespace(dtype="bfloat16", max_num_batched_tokens=8, max_model_len=8, graphs=False)
    plan: Any = SimpleNamespace(max_slots=1)
    configs = [RuntimeConfig.model_validate({"compile_processes": count}) for count in (0, 3, None)]
    jobs = [job_for(config, prepared, needs, plan, "replicated", 1) for config in configs]
    assert [job and job.processes for job in jobs] == [None, 3, 5]


def test_nothing_is_compiled_by_nobody() -> None:
    with open(os.devnull, "wb") as answer:
        assert compile_all([], 3, print, answer) == []
