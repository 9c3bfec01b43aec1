"""A checkpoint that a whole server can serve: a tiny model of `checkpoints` with a real tokenizer of its vocabulary beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ep_runtime.frontend.text.tokenizer import Tokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.text_model import write_text_model


def make_served_checkpoint(family: str, variant: str, path: Path) -> Path:
    """Write weights and text files into the new folder `path`; returns it."""
    text = write_text_model(path.with_name(f"{path.name}-text"))
    make_checkpoint(family, variant, path, vocab_size=Tokenizer.load(text).vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(text / name, path / name)
    # Requests say how they sample; a generation_config.json would add what they leave out.
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return path
