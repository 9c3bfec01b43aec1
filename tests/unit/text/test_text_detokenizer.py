from collections.abc import Sequence

import pytest
import text_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ep_runtime.frontend.text.detokenizer import IncrementalDetokenizer
from ep_runtime.frontend.text.tokenizer import Tokenizer

EXAMPLES = settings(max_examples=150, deadline=None)
CHARS = st.sampled_from("a b\n😀👩‍👩‍👧🏽東é한\u0301<🇯🇵\u200d \t1")


@pytest.fixture(scope="session")
def loaded(request: pytest.FixtureRequest) -> dict[str, tuple[Tokenizer, PreTrainedTokenizerFast]]:
    folders = {name: request.getfixturevalue(f"{name}_folder") for name in ("byte", "pieces", "metaspace")}
    return {name: (Tokenizer.load(path), PreTrainedTokenizerFast.from_pretrained(path)) for name, path in folders.items()}


def stream(tokenizer: Tokenizer, tail: Sequence[int], groups: Sequence[Sequence[int]], skip: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, tail, skip)
    return [*(detokenizer.push(group) for group in groups), detokenizer.finish()]


@pytest.mark.parametrize("name", ["byte", "pieces", "metaspace"])
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@EXAMPLES
def test_sum_is_decode_of_all(loaded: dict, name: str, skip: bool, data: st.DataObject) -> None:
    ours, theirs = loaded[name]
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 3), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=8))
    places = sorted({min(cut, len(ids)) for cut in cuts})
    groups = [ids[start:end] for start, end in zip([0, *places], [*places, len(ids)], strict=True)]
    known = [index for index in ids if index < ours.vocab_size]
    assert "".join(stream(ours, (), groups, skip)) == theirs.decode(known, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte", "pieces"])
@given(data=st.data())
@EXAMPLES
def test_text_comes_back_and_no_piece_is_half_a_character(loaded: dict, name: str, data: st.DataObject) -> None:
    ours, theirs = loaded[name]
    text = data.draw(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd") | CHARS, max_size=30))
    ids = ours.encode(text, False)
    pieces = stream(ours, (), [[index] for index in ids], False)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == theirs.decode(ids)


@given(data=st.data())
@EXAMPLES
def test_after_a_prompt_only_new_text_is_emitted(loaded: dict, data: st.DataObject) -> None:
    for name in ("byte", "pieces"):
        ours, theirs = loaded[name]
        start = ours.encode("Hello" + data.draw(st.sampled_from(["", " ", " fox", "!"])), False)
        ids = ours.encode(data.draw(st.text(CHARS, max_size=12)), False)
        whole, prompt = theirs.decode(start + ids), theirs.decode(start)
        assert prompt + "".join(stream(ours, start, [ids], False)) == whole


def test_leading_space_belongs_to_a_continued_text_alone(pieces_tokenizer: Tokenizer) -> None:
    ids = pieces_tokenizer.encode("Hello fox", False)
    assert "".join(stream(pieces_tokenizer, [], [ids], True)) == "Hello fox"
    assert "".join(stream(pieces_tokenizer, [1], [ids], True)) == "Hello fox"
    spaced = pieces_tokenizer.encode("  Hello", False)
    assert "".join(stream(pieces_tokenizer, [], [[index] for index in spaced], True)) == "  Hello"
    assert "".join(stream(pieces_tokenizer, ids, [ids], True)) == " Hello fox"


@pytest.mark.parametrize("name", ["byte", "pieces"])
def test_every_step_of_an_emoji(loaded: dict, name: str) -> None:
    ours, _ = loaded[name]
    one_byte = {ours.token_bytes(index): index for index in range(ours.vocab_size - 1, -1, -1)}
    emoji = "a👩‍👧é"
    ids = [one_byte[bytes((byte,))] for byte in emoji.encode()]
    detokenizer = IncrementalDetokenizer(ours, (), True)
    pieces = [detokenizer.push([index]) for index in ids]
    assert "".join([*pieces, detokenizer.finish()]) == emoji
    assert all(piece == "" or piece in emoji for piece in pieces)
    if name == "byte":
        assert pieces == ["a", "", "", "", "👩", "", "", "\u200d", "", "", "", "👧", "", "é"]


@pytest.mark.parametrize("name", ["byte", "pieces"])
def test_character_begun_in_the_prompt_is_emitted_whole(loaded: dict, name: str) -> None:
    ours, _ = loaded[name]
    one_byte = {ours.token_bytes(index): index for index in range(ours.vocab_size - 1, -1, -1)}
    ids = [one_byte[bytes((byte,))] for byte in "é東".encode()]
    assert "".join(stream(ours, ids[:3], [ids[3:]], True)) == "東"


def test_cut_off_character_is_replaced_at_the_end_alone(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("ab😀", False)[:-1]
    pieces = stream(byte_tokenizer, (), [[index] for index in ids], True)
    assert "\ufffd" not in "".join(pieces[:-1])
    assert "".join(pieces) == byte_tokenizer.decode(ids, True) == "ab\ufffd"


def test_kept_special_tokens(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("<|im_start|>hi<|im_end|>", False)
    kept = IncrementalDetokenizer(byte_tokenizer, (), True, keep_special=["<|im_end|>", "no such token"])
    assert kept.push(ids) == "hi<|im_end|>"
    assert IncrementalDetokenizer(byte_tokenizer, (), True).push(ids) == "hi"


def test_real_tokenizer_streams_real_text(smollm_tokenizer: Tokenizer) -> None:
    for text in samples.TEXTS:
        ids = smollm_tokenizer.encode(text, False)
        assert "".join(stream(smollm_tokenizer, (), [[index] for index in ids], False)) == smollm_tokenizer.decode(ids, False)
