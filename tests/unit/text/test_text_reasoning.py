import pytest
import text_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_runtime.frontend.text.reasoning import REASONING_NAMES, reasoning_splitter


def split(name: str, prompt: str, pieces: list[str]) -> tuple[str, str]:
    splitter = reasoning_splitter(name, prompt)
    parts = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


OPEN_PROMPT = "<|im_start|>assistant\n<think>\n"
CLOSED_PROMPT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
PLAIN_PROMPT = "what is <think>?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "prompt", "output", "expected"),
    [
        ("qwen3", PLAIN_PROMPT, "<think>\nhm\n</think>\n\nHi", ("hm", "Hi")),
        ("qwen3", OPEN_PROMPT, "hm\nso\n</think>\n\nHi\n", ("hm\nso", "Hi\n")),
        ("qwen3", OPEN_PROMPT, "<think>\nhm</think>Hi", ("hm", "Hi")),
        ("qwen3", CLOSED_PROMPT, "Hi <think>x</think>", ("", "Hi <think>x</think>")),
        ("qwen3", PLAIN_PROMPT, "Hi <think>x</think>", ("", "Hi <think>x</think>")),
        ("qwen3", PLAIN_PROMPT, " \n<think>x</think> y", ("x", " y")),
        ("qwen3", PLAIN_PROMPT, "<thin", ("", "<thin")),
        ("qwen3", OPEN_PROMPT, "cut off </th", ("cut off </th", "")),
        ("qwen3", OPEN_PROMPT, "a < b </ c <b>\n</think>x", ("a < b </ c <b>", "x")),
        ("qwen3", OPEN_PROMPT, "</think>\n\nHi", ("", "Hi")),
        ("qwen3", PLAIN_PROMPT, "<think>\n\n</think>\n\nHi", ("", "Hi")),
        ("auto", PLAIN_PROMPT, "  plain\n", ("", "  plain\n")),
        ("auto", OPEN_PROMPT, "a</think>b</think>c", ("a", "b</think>c")),
        ("deepseek", PLAIN_PROMPT, "hm</think>Hi", ("hm", "Hi")),
        ("deepseek", PLAIN_PROMPT, "<think>\nhm\n</think>\nHi", ("hm", "Hi")),
        ("deepseek", CLOSED_PROMPT, "Hi", ("", "Hi")),
        ("none", OPEN_PROMPT, "<think>a</think>", ("", "<think>a</think>")),
    ],
)
def test_known_outputs(name: str, prompt: str, output: str, expected: tuple[str, str]) -> None:
    assert split(name, prompt, [output]) == expected
    assert split(name, prompt, list(output)) == expected


WORDS = st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "<", "</", "<th", "ink>", "é"]), max_size=12).map("".join)


@pytest.mark.parametrize("name", REASONING_NAMES)
@given(
    prompt=st.sampled_from([OPEN_PROMPT, CLOSED_PROMPT, PLAIN_PROMPT]), text=WORDS, cuts=st.lists(st.integers(0, 80), max_size=8)
)
@settings(max_examples=200, deadline=None)
def test_cuts_change_nothing(name: str, prompt: str, text: str, cuts: list[int]) -> None:
    whole = split(name, prompt, [text])
    assert split(name, prompt, samples.pieces_of(text, cuts)) == whole
    assert split(name, prompt, list(text)) == whole


def test_only_partial_tags_and_line_breaks_wait() -> None:
    splitter = reasoning_splitter("qwen3", OPEN_PROMPT)
    assert splitter.push("so ") == ("so ", "")
    assert splitter.push("far\n") == ("far", "")
    assert splitter.push("<") == ("", "")
    assert splitter.push("b") == ("\n<b", "")
    assert splitter.in_reasoning
    assert splitter.push("</think>x") == ("", "x")
    assert not splitter.in_reasoning


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="known: auto, none, qwen3, deepseek"):
        reasoning_splitter("guess", "")
