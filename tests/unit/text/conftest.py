from pathlib import Path

import pytest
import text_samples as samples

from ep_runtime.demo.checkpoint import gguf_file
from ep_runtime.frontend.text.tokenizer import Tokenizer

QWEN_CONFIG = {
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "add_bos_token": True,  # does not count beside a tokenizer.json
}


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**QWEN_CONFIG, "chat_template": samples.CHATML}
    generation = {"eos_token_id": [2, 0]}
    return samples.save(tmp_path_factory.mktemp("byte"), samples.byte_level_tokenizer(), config, generation_config=generation)


@pytest.fixture(scope="session")
def pieces_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "normalized": False, "special": True},
        "unk_token": "<unk>",
        "chat_template": samples.INST,
    }
    return samples.save(tmp_path_factory.mktemp("pieces"), samples.pieces_tokenizer(), config)


@pytest.fixture(scope="session")
def metaspace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"eos_token": "</s>", "unk_token": "<unk>", "extra_special_tokens": ["<mask_1>"]}
    return samples.save(tmp_path_factory.mktemp("meta"), samples.metaspace_tokenizer(), config)


@pytest.fixture(scope="session")
def smollm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import gguf

    fields = gguf.GGUFReader(gguf_file()).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    control = [index for index, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL]
    tokenizer = samples.gguf_tokenizer(tokens, fields["tokenizer.ggml.merges"].contents(), control)
    config = {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"].contents()],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"].contents()],
        "chat_template": fields["tokenizer.chat_template"].contents(),
    }
    return samples.save(tmp_path_factory.mktemp("smollm"), tokenizer, config)


@pytest.fixture(scope="session")
def byte_tokenizer(byte_folder: Path) -> Tokenizer:
    return Tokenizer.load(byte_folder)


@pytest.fixture(scope="session")
def pieces_tokenizer(pieces_folder: Path) -> Tokenizer:
    return Tokenizer.load(pieces_folder)


@pytest.fixture(scope="session")
def smollm_tokenizer(smollm_folder: Path) -> Tokenizer:
    return Tokenizer.load(smollm_folder)
