"""A head that waits for its device sees what ends its epoch: results that never come keep nobody waiting."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ep_runtime import LLM, SamplingParams
from ep_runtime.engine.broadcast import Broadcaster
from ep_runtime.engine.control import Control
from ep_runtime.engine.epoch import EpochPlace, open_head
from ep_runtime.engine.main import Engine
from ep_runtime.engine.pending import PendingStep
from ep_runtime.engine.port import LocalPort
from protocol import messages
from protocol.errors import EpEpochClosed, EpPeerGone
from protocol.messages import Submit
from protocol.progress import ProgressPage
from tests.support.checkpoints import make_checkpoint
from tests.support.engine import load
from tests.support.rank_context import RankContext

CONTEXT = RankContext(rank=0, world=1, epoch=0, store_port=0, store_fd=None, runtime_dir=Path(), kwargs={})
SIZES = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
LOOKS = 5
MOST_LOOKS = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("mixtral", "plain", tmp_path_factory.mktemp("waits") / "model"))


def stuck_device(monkeypatch: pytest.MonkeyPatch, at: Callable[[int], None]) -> None:
    """No step is ever done; `at` is told of each look at one."""
    looks = 0

    def ready(step: PendingStep) -> bool:
        nonlocal looks
        looks += 1
        assert looks < MOST_LOOKS, "nobody has looked at the epoch"
        at(looks)
        return False

    monkeypatch.setattr(PendingStep, "ready", ready)


def test_an_engines_head_leaves_when_its_epoch_is_closed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    over: list[int] = []
    stuck_device(monkeypatch, lambda looks: over.append(looks) if looks == LOOKS else None)
    rank = load(CONTEXT, folder, **SIZES)
    place = EpochPlace(epoch=0, world=1, store="", links="", token="")
    epoch, broadcaster, links = open_head(rank, place, None, lambda: bool(over))
    engine = Engine(Control.__new__(Control), ProgressPage(), device_index=0, local_ranks=1, runtime_dir=Path())
    told: list[messages.SequenceUpdate] = []
    port = LocalPort(lambda results: told.extend(results.updates))
    with closing(epoch), closing(links):
        head = engine._head(place, rank, epoch, broadcaster, port)  # type: ignore[arg-type]
        sampling = messages.SamplingParams(seed=0, temperature=0.0, max_tokens=4)
        port.send(Submit(request_id="0", group="0", prompt=[5, 6, 7], sampling=sampling))
        with pytest.raises(EpEpochClosed):
            head.run(lambda: False, lambda: 0.0)
    assert not told


def test_offline_a_rank_that_is_lost_ends_the_call(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[int] = []
    check = Broadcaster.check

    def checking(broadcaster: Broadcaster) -> None:
        if gone:
            raise EpPeerGone("rank 1 is gone")
        check(broadcaster)

    monkeypatch.setattr(Broadcaster, "check", checking)
    with LLM(folder, **SIZES, device="cpu", threads=1) as llm:
        stuck_device(monkeypatch, lambda looks: gone.append(looks) if looks == LOOKS else None)
        with pytest.raises(EpPeerGone):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
