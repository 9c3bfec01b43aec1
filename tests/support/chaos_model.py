"""A checkpoint that a whole server can serve: a tiny model of `checkpoints` with a real tokenizer of its vocabulary beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ep_runtime.frontend.text.tokenizer import Tokenizer
from tests.support.checkpoints import make_checkpoint, read_config
from tests.support.text_model import write_text_model
from tests.support.vision_checkpoints import Tokens, make_vision_checkpoint
from tests.support.vision_text_model import write_vision_text_model


def make_served_checkpoint(family: str, variant: str, path: Path) -> Path:
    """Write weights and text files into the new folder `path`; returns it. The variant "images" takes images."""
    if variant == "images":
        return _with_images(family, path)
    text = write_text_model(path.with_name(f"{path.name}-text"))
    make_checkpoint(family, variant, path, vocab_size=Tokenizer.load(text).vocab_size)
    return _finish(text, path)


def _with_images(name: str, path: Path) -> Path:
    """A checkpoint of `vision_checkpoints`."""
    text = write_vision_text_model(path.with_name(f"{path.name}-text"))
    ids = read_config(text)
    special = {kind: ids[f"{kind}_token_id"] for kind in ("image", "video")}
    special |= {side: ids[f"vision_{side}_token_id"] for side in ("start", "end")}
    make_vision_checkpoint(name, path, Tokens(vocab_size=Tokenizer.load(text).vocab_size, **special))
    return _finish(text, path)


def _finish(text: Path, path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(text / name, path / name)
    # Requests say how they sample; a generation_config.json would add what they leave out.
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return path
