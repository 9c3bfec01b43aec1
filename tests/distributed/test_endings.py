"""How a start or a script that fails looks to its operator: one clear line or its own error, a status other than 0, nobody left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.ports import free_port
from tests.support.text_model import write_text_model

WAIT_SECONDS = 90.0
Checkpoint = Callable[[str, str], Path]

SCRIPT = """
import sys
from ep_runtime import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)
answer = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0].outputs[0]
print("tokens", len(answer.token_ids), flush=True)
if sys.argv[2] == "fails":
    raise ArithmeticError("this script is wrong")
"""


def run(folder: Path, *command: str) -> tuple[int, str]:
    """Exit status and output of a child in `folder`; no process of its session survives it."""
    child = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        output, _ = child.communicate(timeout=WAIT_SECONDS)
    finally:
        child.kill()
    assert [line for process in psutil.process_iter() if str(folder) in " ".join(line := command_line(process))] == []
    return child.returncode, output


def command_line(process: psutil.Process) -> list[str]:
    """Empty for a process that is over; any may end while it is looked at."""
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def torchrun(folder: Path, model: Path, mode: str) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return run(folder, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(model), mode)


def test_a_script_on_two_ranks_may_end_without_closing_its_llm(checkpoint: Checkpoint, tmp_path: Path) -> None:
    status, output = torchrun(tmp_path, checkpoint("mixtral", "plain"), "works")
    assert (status, output.count("tokens 4")) == (0, 1), output


def test_a_script_that_fails_on_rank_0_ends_both_ranks_with_its_own_error(checkpoint: Checkpoint, tmp_path: Path) -> None:
    status, output = torchrun(tmp_path, checkpoint("mixtral", "plain"), "fails")
    assert status != 0
    assert output.count("ArithmeticError: this script is wrong") == 1
    assert "EpPeerGone" not in output


@pytest.mark.parametrize("fault", ["missing tensor", "no memory", "too long"])
def test_a_model_that_cannot_be_served_is_named_on_the_last_line(checkpoint: Checkpoint, tmp_path: Path, fault: str) -> None:
    model = tmp_path / "checkpoint"
    write_text_model(model)
    shutil.copytree(checkpoint("mixtral", "plain"), model, dirs_exist_ok=True)
    arguments = [f"--port={free_port()}"]
    said = {
        "missing tensor": "CheckpointError: 1 tensors are missing: lm_head.weight",
        "no memory": "MemoryPlanError",
        "too long": "max_model_len is 9000; this model has 512 positions",
    }
    if fault == "missing tensor":
        config = json.loads((model / "config.json").read_text())
        assert not config["tie_word_embeddings"]
        drop_tensor(model / "model.safetensors", "lm_head.weight")
    elif fault == "no memory":
        arguments.append("--num-blocks=1000000000")
    else:
        arguments.append("--max-model-len=9000")
    status, output = run(tmp_path, "-m", "ep_runtime.serve", "--model", str(model), "--device=cpu", *arguments)
    assert status == 1
    assert "ep-runtime failed: rank 0: " in output
    assert said[fault] in output[output.index("ep-runtime failed") :]
    assert "Traceback" not in output


def drop_tensor(path: Path, name: str) -> None:
    """Rewrite a safetensors file without one of its tensors."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
