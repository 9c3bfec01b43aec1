import json
import threading
from pathlib import Path

import pytest
import text_samples as samples
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from ep_runtime.frontend.text.errors import TokenizerError
from ep_runtime.frontend.text.tokenizer import Tokenizer

FOLDERS = ["byte_folder", "pieces_folder", "metaspace_folder", "smollm_folder"]


@pytest.fixture(params=FOLDERS)
def both(request: pytest.FixtureRequest) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    folder = request.getfixturevalue(request.param)
    return Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)


def test_encode_and_decode_are_transformers(both: tuple[Tokenizer, PreTrainedTokenizerFast]) -> None:
    ours, theirs = both
    for text in samples.TEXTS:
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_vocabulary_and_special_tokens_are_transformers(both: tuple[Tokenizer, PreTrainedTokenizerFast]) -> None:
    ours, theirs = both
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == {index for index, token in theirs.added_tokens_decoder.items() if token.special}
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert ours.eos_token_ids[0] == theirs.eos_token_id
    assert ours.special_tokens == theirs.special_tokens_map
    for index in range(0, ours.vocab_size, 7):
        assert ours.token_text(index) == theirs.convert_ids_to_tokens(index)


def test_end_tokens_of_all_files(byte_folder: Path, pieces_folder: Path, tmp_path: Path) -> None:
    assert Tokenizer.load(byte_folder).eos_token_ids == (2, 0)
    assert Tokenizer.load(pieces_folder).eos_token_ids == (2,)
    tokenizer = samples.byte_level_tokenizer()
    folder = samples.save(tmp_path, tokenizer, {"eos_token": "<|im_end|>"}, config={"text_config": {"eos_token_id": 0}})
    assert Tokenizer.load(folder).eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"added_tokens_decoder": {"425": {"content": "<extra>", "special": True, "normalized": False}}}, {}),
        ({"added_tokens_decoder": {"426": {"content": "<vid>"}, "425": {"content": "<extra>", "lstrip": True}}}, {}),
        ({}, {"added_tokens": {"<extra>": 425}, "special_tokens_map": {"eos_token": "<|im_end|>", "pad_token": "<pad>"}}),
        ({"image_token": "<img>", "extra_special_tokens": {"video_token": "<vid>"}}, {}),
        ({"eos_token": "<tool_call>"}, {}),
    ],
    ids=["decoder", "decoder_order", "older_files", "model_specific", "plain_made_special"],
)
def test_added_tokens_of_other_files(tmp_path: Path, config: dict, files: dict) -> None:
    folder = samples.save(tmp_path, samples.byte_level_tokenizer(), {"eos_token": "<|im_end|>", **config}, **files)
    ours, theirs = Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == {index for index, token in theirs.added_tokens_decoder.items() if token.special}
    text = "a<extra>b<img><vid><pad><tool_call>c"
    ids = ours.encode(text, False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)


def test_token_bytes_byte_level(byte_tokenizer: Tokenizer, smollm_tokenizer: Tokenizer) -> None:
    for tokenizer in (byte_tokenizer, smollm_tokenizer):
        for text in samples.TEXTS:
            ids = tokenizer.encode(text, False)
            if tokenizer.decode(ids, False) == text:
                assert b"".join(tokenizer.token_bytes(index) for index in ids) == text.encode()
    every = {byte_tokenizer.token_bytes(index) for index in range(byte_tokenizer.vocab_size)}
    assert {bytes((byte,)) for byte in range(256)} <= every
    assert byte_tokenizer.token_bytes(byte_tokenizer.encode("é東", False)[0]) == "é東".encode()


def test_token_bytes_pieces(pieces_tokenizer: Tokenizer) -> None:
    assert pieces_tokenizer.token_bytes(pieces_tokenizer.token_id("<0xE2>") or 0) == b"\xe2"
    assert pieces_tokenizer.token_bytes(pieces_tokenizer.token_id("▁Hello") or 0) == b" Hello"
    ids = pieces_tokenizer.encode("Hello 😀 x", False)
    assert b"".join(map(pieces_tokenizer.token_bytes, ids)) == " Hello 😀 x".encode()


def test_ids_outside_of_the_vocabulary_give_nothing(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.token_text(10**12) == ""
    assert byte_tokenizer.token_bytes(-1) == b""
    ids = byte_tokenizer.encode("hi", False)
    assert byte_tokenizer.decode([-5, *ids, byte_tokenizer.vocab_size, 2**40], True) == "hi"


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    tokenizer = samples.byte_level_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    loaded = Tokenizer.load(samples.save(tmp_path, tokenizer, {"eos_token": "<|im_end|>"}))
    text = "Hello, world! Hello there"
    assert loaded.decode(loaded.encode(text), False) == text


def test_missing_and_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(tmp_path)
    folder = samples.save(tmp_path, samples.byte_level_tokenizer(), {})
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: not readable"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), None, decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()])])
def test_other_decoders_are_refused_by_name(tmp_path: Path, decoder: object) -> None:
    folder = samples.save(tmp_path, samples.byte_level_tokenizer(), {})
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())  # type: ignore[attr-defined]
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(TokenizerError, match="unsupported decoder"):
        Tokenizer.load(folder)


def test_threads_share_one(byte_tokenizer: Tokenizer) -> None:
    expected = [byte_tokenizer.encode(text) for text in samples.TEXTS]
    failures: list[object] = []

    def work() -> None:
        for _ in range(50):
            found = [byte_tokenizer.encode(text) for text in samples.TEXTS]
            if found != expected:
                failures.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
