"""Flags of a server that a benchmark starts for a model folder, complete or of a configuration alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ep_runtime.bench.recovery import write_tokenizer


def server_flags(
    model: Path,
    name: str,
    folder: Path,
    *,
    device: str,
    dtype: str,
    load_format: str,
    max_model_len: int,
    max_num_seqs: int | None,
    more: Sequence[str] = (),
) -> tuple[list[str], int]:
    """The flags, and the size of the model's vocabulary. A model without a tokenizer gets one in `folder` that shows all tokens."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    vocab_size: int = config.get("text_config", config)["vocab_size"]
    flags = ["--model", str(model), "--served-model-name", name, "--device", device, "--dtype", dtype]
    flags += ["--load-format", load_format, "--generation-config", "none", "--max-model-len", str(max_model_len)]
    flags += ["--max-num-seqs", str(max_num_seqs)] if max_num_seqs else []
    if not (model / "tokenizer.json").exists():
        flags += ["--tokenizer", str(write_tokenizer(folder / "tokenizer", vocab_size))]
    return [*flags, *more], vocab_size
