"""Loading holds this rank's share and at most one tensor more, measured in a process of its own.

Anonymous memory is what counts: pages of mapped files belong to the page cache and can be dropped at any time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

EXPERTS, ROWS, COLUMNS = 12, 1024, 2048
TENSOR = ROWS * COLUMNS * 2

SCRIPT = """
import gc, json, sys
from pathlib import Path
import torch
from torch import nn
from model.folder import read_manifest
from model.loading.materialise import materialise, write_piece
from model.loading.sources import FileSource
from model.parallel import ExpertPlacement
from model.pieces import Piece, WeightMap

folder, rank, world, experts, rows, columns, dtype = Path(sys.argv[1]), *map(int, sys.argv[2:7]), getattr(torch, sys.argv[7])
held = ExpertPlacement.build(experts, world).local(rank)
module = nn.ParameterDict({str(e): nn.Parameter(torch.empty(rows, columns, dtype=dtype, device="meta"), False) for e in held})
pieces = WeightMap(pieces={str(e): (Piece(name=f"expert.{e}", shape=(rows, columns)),) for e in held})

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

torch.ones(1 << 20).to(dtype).aminmax()
peaks = []
with FileSource(folder, read_manifest(folder)) as source:
    class Watched:
        def read(self, piece):
            value = source.read(piece)
            peaks.append(anonymous())
            return value
    base = anonymous()
    written = materialise(module, pieces, Watched(), device=torch.device("cpu"), advance=lambda _: peaks.append(anonymous()))
print(json.dumps({"base": base, "peak": max(peaks), "end": anonymous(), "written": written, "threads": len(peaks)}))
"""


def measure(folder: Path, rank: int, world: int, dtype: str) -> dict[str, int]:
    arguments = [str(value) for value in (folder, rank, world, EXPERTS, ROWS, COLUMNS, dtype)]
    result = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_peak_is_the_share_and_one_tensor(tmp_path: Path) -> None:
    names = [f"expert.{expert}" for expert in range(EXPERTS)]
    save_file({name: torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16) for name in names}, tmp_path / "model.safetensors")
    for rank, world, dtype, share in (
        (0, 1, "bfloat16", 12 * TENSOR),
        (1, 3, "bfloat16", 4 * TENSOR),
        (2, 3, "float32", 8 * TENSOR),
    ):
        seen = measure(tmp_path, rank, world, dtype)
        assert seen["written"] == share
        assert seen["end"] - seen["base"] >= share * 0.95
        assert seen["peak"] - seen["base"] <= share + TENSOR, seen
