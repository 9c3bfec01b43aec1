"""Rows that stay with their owners, moved by several processes in Triton's interpreter: the bits of sums, where they belong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.distributed.comm_cases import part
from tests.distributed.one_shot_cases import choices
from tests.distributed.owned_rows_cases import EPS, LEFT, added, owners_of
from tests.support.ranks import RankPool

CASES = "tests.distributed.owned_rows_cases:"
PATIENCE_S = 480.0
"""See `test_one_shot`."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is chosen where there is no GPU")


def wide_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """In float64."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def in_order(parts: list[np.ndarray], of: torch.dtype) -> np.ndarray:
    """Added one after another in float32, rounded once to `of`; float64 values."""
    total = np.zeros_like(parts[0])
    for one in parts:
        total += one
    return torch.from_numpy(total).to(of).double().numpy()


def chosen_part(rank: int, world: int, call: int, shape: tuple[int, int], of: torch.dtype) -> np.ndarray:
    """A rank's choices of each row, in their order."""
    value, mine = choices(rank, world, call, shape, of)
    outputs = [np.where(mine[:, choice, None], value[:, choice].float(), 0).astype(np.float32) for choice in range(3)]
    return in_order(outputs, of).astype(np.float32)


def error(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(got - exact).max(initial=0.0) / max(1.0, np.abs(exact).max(initial=0.0)))


SHAPES = [[1, 48], [3, 48], [17, 48], [4, 48], [0, 48], [5, 48], [65, 48], [2, 48], [4, 48], [1, 48]]
"""65 rows are several tiles of a program, the last of them with rows to spare."""


@pytest.mark.parametrize(
    ("world", "dtype", "programs", "word_rows", "two_shots", "shapes"),
    [
        (2, "float16", 2, 4, False, SHAPES),
        (3, "float32", 2, 4, True, SHAPES),
        pytest.param(4, "float32", 2, 3, True, [[3, 48], [18, 48], [2, 48], [4, 48]], marks=pytest.mark.slow),
    ],
)
def test_owners_have_the_sums_of_their_rows_and_all_have_the_norms_that_owners_made(
    ranks: RankPool, world: int, dtype: str, programs: int, word_rows: int, two_shots: bool, shapes: list[list[int]]
) -> None:
    """Beside sums of all rows in one memory, which give the same bits; owners change from call to call."""
    ways = {"programs": programs, "word_rows": word_rows, "two_shots": two_shots, "shapes": shapes}
    found = ranks.run(world, CASES + "move_rows", dtype=dtype, **ways, deadline=PATIENCE_S)
    of, tolerance = getattr(torch, dtype), 1e-5 if dtype == "float32" else 2e-3
    for call, (rows, width) in enumerate(shapes):
        owners = owners_of(call, rows, world).numpy()
        more = {name: tensor.double().numpy() for name, tensor in added(call, (rows, width), of).items()}
        parts = [part(rank, call, (rows, width), of).float().numpy() for rank in range(world)]
        chosen = in_order([chosen_part(rank, world, call, (rows, width), of) for rank in range(world)], of)
        gated = more["shared"] / (1 + np.exp(-more["gate"]))
        exact = {"x": in_order(parts, of) + more["x"] + gated, "x of choices": chosen + more["x"]}
        own_parts = np.stack(parts)[owners, np.arange(rows)].astype(np.float64)
        exact["x of the gather"] = own_parts + more["x"]
        for rank in range(world):
            got, mine = found[rank][call], owners == rank
            for name, value in exact.items():
                assert error(got[name][mine], value[mine]) < tolerance, (call, name)
                assert (got[name][~mine] == LEFT).all(), (call, name, "was written for another rank")
            assert error(got["normed"][mine], wide_norm(got["x"][mine].astype(np.float64), more["weight"])) < tolerance, call
            assert (
                error(got["normed of choices"][mine], wide_norm(got["x of choices"][mine].astype(np.float64), 1 + more["weight"]))
                < tolerance
            ), call
            assert error(got["gathered"], wide_norm(exact["x of the gather"], more["weight"])) < 2 * tolerance, call
            assert np.array_equal(got["x"][mine], got["x of the sum"][mine]), call
            for name in ("normed", "normed of choices"):
                assert np.array_equal(got[name][mine], got[f"{name} of the sum"][mine]), (call, name)
            assert np.array_equal(got["gathered"], found[0][call]["gathered"]), call
            made = np.stack([found[owner][call]["normed"][row] for row, owner in enumerate(owners)]) if rows else got["shown"]
            assert np.array_equal(got["shown"], made), call


@pytest.mark.parametrize("kind", ["owner", "other", "scatter"])
@pytest.mark.parametrize("word_rows", [0, 8])
def test_the_host_ends_a_wait_for_a_peer_that_does_not_come(ranks: RankPool, kind: str, word_rows: int) -> None:
    """An owner that gathers waits, too: it may not run ahead of those that read its rows."""
    assert ranks.run(2, CASES + "gather_alone", rows=4, word_rows=word_rows, kind=kind, deadline=60.0) == [True, True]
