import pytest
import text_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_runtime.frontend.text.stops import StopMatcher


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    text = ""
    for piece in pieces:
        emit, matched = matcher.push(piece)
        text += emit
        if matched is not None:
            assert matcher.push("more") == ("", matched)
            break
    return text + matcher.finish(), matcher.matched


def reference(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """By definition: the shortest prefix that ends with a stop string, and the longest such string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    text=st.text("ab\nc", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=10),
    include=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_result_is_the_definition_however_the_stream_is_cut(stops: list[str], text: str, cuts: list[int], include: bool) -> None:
    assert run(stops, samples.pieces_of(text, cuts), include) == reference(stops, text, include)


@given(stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), text=st.text("abc", max_size=30))
@settings(max_examples=200, deadline=None)
def test_holds_back_only_what_may_become_a_stop(stops: list[str], text: str) -> None:
    matcher, emitted = StopMatcher(stops), ""
    for count, char in enumerate(text, 1):
        emit, matched = matcher.push(char)
        if matched is not None:
            return
        emitted += emit
        held = text[len(emitted) : count]
        assert emitted + held == text[:count]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["END"], "helloENDworld", ("hello", "END")),
        (["END"], "helloEN", ("helloEN", None)),
        (["bc", "abcd"], "xabcd", ("xa", "bc")),
        (["c", "abc", "bc"], "xabcd", ("x", "abc")),
        (["aab"], "aaaab", ("aa", "aab")),
        (["\n\n"], "one\n\n", ("one", "\n\n")),
        (["😀"], "a😀", ("a", "😀")),
        ([], "abc", ("abc", None)),
    ],
)
def test_known_cases(stops: list[str], text: str, expected: tuple[str, str | None]) -> None:
    assert run(stops, [text]) == expected
    assert run(stops, list(text)) == expected


def test_included_stop_and_empty_stop() -> None:
    assert run(["END"], ["xE", "NDy"], include=True) == ("xEND", "END")
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
