"""The demo checkpoint against transformers' own reading of the same GGUF file."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, MixtralForCausalLM

from ep_runtime.demo.checkpoint import demo_checkpoint, gguf_file

QUESTIONS = {
    "What is the capital of France? Answer in one sentence.": "The capital of France is Paris.",
    "How many days are in a week?": "7 days",
}
TEXTS = ["Hello  world", " it's 1234.5\n\n\tend ", "é 日本語 😀", "a<|im_end|>b", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("demo")
    yield demo_checkpoint(root)
    shutil.rmtree(root)  # half a gigabyte


@pytest.fixture(scope="module")
def source() -> Path:
    return gguf_file()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def test_the_mixture_says_what_the_dense_model_says(folder, source, tokenizer):
    dense = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    mixture = MixtralForCausalLM.from_pretrained(folder)
    assert mixture.dtype == torch.float32
    for question, answer in QUESTIONS.items():
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        tokens = dense.generate(ids, max_new_tokens=10, do_sample=False)
        start = ids.shape[1]
        expected, got = dense(tokens).logits, mixture(tokens).logits
        assert torch.allclose(got, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)
        # While every choice is the same, one forward over the whole text makes all of the mixture's choices.
        assert torch.equal(got[0, start - 1 : -1].argmax(-1), tokens[0, start:])
        assert answer in tokenizer.decode(tokens[0, start:])


def test_the_tokenizer_is_the_ggufs(source, tokenizer):
    reference = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids == reference(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "<|im_end|>"


def test_experts_are_exact_slices_with_a_router_that_chooses_all(folder):
    from safetensors import safe_open

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    assert config["num_local_experts"] == config["num_experts_per_tok"] == 8
    assert config["intermediate_size"] == 192
    assert len(set(index["weight_map"].values())) == 3
    name = "model.layers.29.block_sparse_moe.gate.weight"
    with safe_open(folder / index["weight_map"][name], "np") as weights:
        assert not weights.get_tensor(name).any()
    assert len(index["weight_map"]) == 2 + 30 * (7 + 3 * 8)


def test_a_second_call_finds_the_folder_and_leaves_no_other(folder):
    before = (folder / "config.json").stat().st_mtime_ns
    assert demo_checkpoint(folder.parent) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    assert list(folder.parent.iterdir()) == [folder]
