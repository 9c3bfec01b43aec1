"""The pure parts of the recovery benchmark; the rest of it needs a server, which tests/chaos has."""

from pathlib import Path

import torch

from ep_runtime.bench.recovery import recovery_phases, write_tokenizer
from ep_runtime.bench.tiny import VOCAB, write_tiny
from ep_runtime.frontend.text.tokenizer import Tokenizer
from model.loader import load_model
from model.parallel import Parallel


def test_phases_are_read_from_the_metrics_by_name() -> None:
    metrics = {
        "ep_epoch": 2.0,
        'ep_recovery_seconds_total{phase="load"}': 9.0,
        'ep_last_recovery_seconds{phase="load"}': 0.5,
        'ep_last_recovery_seconds{phase="total"}': 1.25,
    }
    assert recovery_phases(metrics) == {"load": 0.5, "total": 1.25}


def test_the_tokenizer_of_bytes_reads_every_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer"))
    assert tokenizer.vocab_size == 256
    text = "Größe {} 漢字\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_tiny_checkpoint_has_every_tensor_of_its_configuration(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    loaded = load_model(tmp_path, Parallel(0, 1), dtype=torch.float32, device="cpu", progress=False)
    assert loaded.spec.vocab_size == VOCAB
