import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import text_samples as samples

from ep_runtime.frontend.text.errors import GrammarError
from ep_runtime.frontend.text.grammar import MAX_PATTERN_CHARS, MAX_SCHEMA_BYTES, Grammar, GrammarFactory
from ep_runtime.frontend.text.tokenizer import Tokenizer
from ep_runtime.frontend.text.tools import marker_tokens, tool_parser

WIDTH = 500  # above the tokenizer's 425, and no multiple of 32

ZIP = {"type": "string", "pattern": "^[0-9]{5}$"}
PLACE = {"type": "object", "properties": {"zip": ZIP}, "required": ["zip"], "additionalProperties": False}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "é", 3]}, "maxItems": 3},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"anyOf": [{"type": "null"}, PLACE]}},
}


@pytest.fixture(scope="module")
def factory(byte_tokenizer: Tokenizer) -> GrammarFactory:
    return GrammarFactory(byte_tokenizer, WIDTH)


@pytest.fixture(scope="module")
def pieces_factory(pieces_tokenizer: Tokenizer) -> GrammarFactory:
    return GrammarFactory(pieces_tokenizer)


def allowed(grammar: Grammar, width: int = WIDTH) -> list[int]:
    mask = grammar.mask()
    assert len(mask) == (width + 31) // 32 * 4
    words = [int.from_bytes(mask[start : start + 4], "little") for start in range(0, len(mask), 4)]
    return [32 * word + bit for word, bits in enumerate(words) for bit in range(32) if bits >> bit & 1]


def walk(grammar: Grammar, tokenizer: Tokenizer, chance: random.Random, width: int = WIDTH) -> list[int]:
    """Random tokens under the mask, up to the first end token; a long output prefers what brings it to its end."""
    ids: list[int] = []
    ends = set(tokenizer.eos_token_ids)
    while True:
        assert len(ids) < 1000
        choices = allowed(grammar, width)
        assert choices
        assert max(choices) < tokenizer.vocab_size
        assert grammar.may_end == bool(ends.intersection(choices)) == ends.issubset(choices)
        if grammar.finished:
            assert set(choices) == ends
        if ends.issubset(choices) and (len(ids) > 20 or grammar.finished or chance.random() < 0.3):
            assert grammar.accept(tokenizer.eos_token_ids[0])
            return ids
        choices = [index for index in choices if index not in ends]
        if len(ids) > 40 and take(grammar, leave := tokenizer.encode("\n</parameter>\n", False)):
            ids += leave
            continue
        if len(ids) > 40:
            # Closing tokens first, so that free strings and lists end.
            closing = [index for index in choices if tokenizer.token_bytes(index)[:1] in (b'"', b"}", b"]", b"\n", b"<")]
            choices = closing or choices
        token = chance.choice(choices)
        assert grammar.accept(token)
        ids.append(token)


def take(grammar: Grammar, ids: list[int]) -> bool:
    """Accepts all of these tokens, or none."""
    for count, index in enumerate(ids):
        if not grammar.accept(index):
            grammar.rollback(count)
            return False
    return True


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "object", "properties": {}, "additionalProperties": False},
    PERSON,
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4},
    {"type": "string", "enum": ["yes", "no", "naïve 😀"]},
    {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    {"type": "object", "properties": {"x": {"const": {"k": [1, "two"]}}}, "required": ["x"]},
    {"type": "string", "format": "date"},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_random_walks_give_valid_json(factory: GrammarFactory, byte_tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    for seed in range(12):
        text = byte_tokenizer.decode(walk(factory.json_schema(schema), byte_tokenizer, random.Random(seed)), False)
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def test_random_walks_with_byte_fallback(pieces_factory: GrammarFactory, pieces_tokenizer: Tokenizer) -> None:
    width = pieces_tokenizer.vocab_size
    for seed in range(12):
        ids = walk(pieces_factory.json_schema(PERSON), pieces_tokenizer, random.Random(seed), width)
        text = b"".join(map(pieces_tokenizer.token_bytes, ids)).decode()
        jsonschema.validate(json.loads(text), PERSON)


def test_model_vocabulary_smaller_than_the_tokenizers(byte_tokenizer: Tokenizer) -> None:
    narrow, wide = (GrammarFactory(byte_tokenizer, width).json_object() for width in (301, WIDTH))
    for grammar in (narrow, wide):
        assert take(grammar, [byte_tokenizer.encode(char, False)[0] for char in '{"'])
    assert any(301 <= index < 320 for index in allowed(wide))
    assert allowed(narrow, 301) == [index for index in allowed(wide) if index < 301]


def test_json_object_is_an_object(factory: GrammarFactory, byte_tokenizer: Tokenizer) -> None:
    for seed in range(12):
        value = json.loads(byte_tokenizer.decode(walk(factory.json_object(), byte_tokenizer, random.Random(seed)), False))
        assert isinstance(value, dict)


def test_white_space_is_bounded(factory: GrammarFactory, byte_tokenizer: Tokenizer) -> None:
    pretty = json.dumps({"a": [1, {"b": "c"}], "d": None}, indent=4)
    grammar = factory.json_object()
    assert all(grammar.accept(index) for index in byte_tokenizer.encode(pretty, False))
    assert grammar.finished
    grammar = factory.json_object()
    space = byte_tokenizer.encode(" ", False)[0]
    taken = [grammar.accept(index) for index in [*byte_tokenizer.encode("{", False), *[space] * 100]]
    assert taken.count(True) < 70


@pytest.mark.parametrize("pattern", [r"(ab/|\d{2}\n)+x?", r"[/\d]{3}\\\d\D\/", "a\n/b|\\\\d", r"\.\/[\]a]"])
def test_regex(factory: GrammarFactory, byte_tokenizer: Tokenizer, pattern: str) -> None:
    for seed in range(8):
        text = byte_tokenizer.decode(walk(factory.regex(pattern), byte_tokenizer, random.Random(seed)), False)
        assert re.fullmatch(pattern, text, re.ASCII)


def test_accept_refuses_and_changes_nothing(factory: GrammarFactory, byte_tokenizer: Tokenizer) -> None:
    grammar = factory.json_schema({"type": "array", "items": {"type": "integer"}})
    opening, one, closing = (byte_tokenizer.encode(char, False)[0] for char in "[1]")
    before = grammar.mask()
    for token in (one, byte_tokenizer.eos_token_ids[0], WIDTH - 1, WIDTH + 5, -1):
        assert not grammar.accept(token)
    assert grammar.mask() == before
    assert grammar.accept(opening)
    assert not grammar.may_end
    assert grammar.accept(one)
    assert grammar.accept(closing)
    assert grammar.finished
    assert grammar.accept(byte_tokenizer.eos_token_ids[1])
    assert not grammar.accept(one)


def test_rollback(factory: GrammarFactory, byte_tokenizer: Tokenizer) -> None:
    grammar = factory.json_schema({"type": "array", "items": {"type": "integer"}})
    masks = []
    ids = byte_tokenizer.encode("[12]", False)
    for token in [*ids, byte_tokenizer.eos_token_ids[0]]:
        masks.append(grammar.mask())
        assert grammar.accept(token)
    for count in range(1, len(ids) + 2):
        grammar.rollback(1)
        assert grammar.mask() == masks[-count]
    for token in [*ids, byte_tokenizer.eos_token_ids[0]]:
        assert grammar.accept(token)
    grammar.rollback(2)
    assert grammar.mask() == masks[len(ids) - 1]
    with pytest.raises(GrammarError, match="cannot take back"):
        grammar.rollback(99)


@pytest.mark.parametrize("parser_name", ["hermes", "qwen3_xml", "mistral"])
@pytest.mark.parametrize("choice", ["required", "get_weather", {"type": "function", "function": {"name": "now"}}])
def test_forced_calls_are_read_back_by_their_parser(
    factory: GrammarFactory, byte_tokenizer: Tokenizer, parser_name: str, choice: str | dict[str, Any]
) -> None:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in samples.TOOLS}
    for seed in range(10):
        ids = walk(factory.tool_calls(samples.TOOLS, choice, parser_name), byte_tokenizer, random.Random(seed))
        parser = tool_parser(parser_name, samples.TOOLS)
        text = byte_tokenizer.decode(ids, False)
        outcome = [parser.push(text), parser.finish()]
        assert "".join(content for content, _ in outcome) == ""
        calls: list[list[str]] = []
        for delta in itertools.chain(*(deltas for _, deltas in outcome)):
            calls += [[delta.name, ""]] if delta.name else []
            calls[-1][1] += delta.arguments
        assert calls
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[name] or {"type": "object", "maxProperties": 0})
        if choice != "required":
            assert [name for name, _ in calls] == ["get_weather" if isinstance(choice, str) else "now"]


@pytest.mark.parametrize("parser_name", ["hermes", "qwen3_xml", "mistral"])
def test_calls_or_json_is_either_and_its_parser_agrees(
    factory: GrammarFactory, byte_tokenizer: Tokenizer, parser_name: str
) -> None:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in samples.TOOLS}
    quote = {"type": "array", "items": {"enum": ["<tool_call>", "[TOOL_CALLS]", '<tool_call>{"name": "now", "arguments": {}}']}}
    for seed, lead in itertools.product(range(4), ['["', marker_tokens(parser_name)[0]]):
        grammar = factory.calls_or_json(samples.TOOLS, {**quote, "minItems": 1, "maxItems": 3}, parser_name)
        ids = byte_tokenizer.encode(lead, False)
        assert all(grammar.accept(index) for index in ids)
        text = byte_tokenizer.decode([*ids, *walk(grammar, byte_tokenizer, random.Random(seed))], False)
        parser = tool_parser(parser_name, samples.TOOLS, form="calls or json")
        outcome = [parser.push(text), parser.finish()]
        content = "".join(content for content, _ in outcome)
        calls: list[list[str]] = []
        for delta in itertools.chain(*(deltas for _, deltas in outcome)):
            calls += [[delta.name, ""]] if delta.name else []
            calls[-1][1] += delta.arguments
        assert bool(calls) is (lead != '["')
        assert content == ("" if calls else text)
        if not calls:
            jsonschema.validate(json.loads(content), quote)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[name] or {"type": "object", "maxProperties": 0})


def test_calls_or_json_without_a_schema_is_an_object(factory: GrammarFactory, byte_tokenizer: Tokenizer) -> None:
    first = {byte_tokenizer.encode(char, False)[0]: char for char in '{["<1'}
    grammar = factory.calls_or_json(samples.TOOLS, None)
    assert {first[index] for index in allowed(grammar) if index in first} == {"{"}
    assert byte_tokenizer.token_id("<tool_call>") in allowed(grammar)


def calls_of(parser_name: str, text: str) -> tuple[str, list[list[str]]]:
    """Content, and calls as name and arguments."""
    parser = tool_parser(parser_name, samples.TOOLS)
    outcome = [parser.push(text), parser.finish()]
    calls: list[list[str]] = []
    for delta in itertools.chain(*(deltas for _, deltas in outcome)):
        calls += [[delta.name, ""]] if delta.name else []
        calls[-1][1] += delta.arguments
    return "".join(content for content, _ in outcome), calls


@pytest.fixture
def either_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """One whose `<tool_call>` is a token, or one that spells it."""
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer


EITHER_WAY = pytest.mark.parametrize("either_tokenizer", ["byte_tokenizer", "pieces_tokenizer"], indirect=True)


@EITHER_WAY
@pytest.mark.parametrize("parser_name", ["hermes", "qwen3_xml", "mistral"])
@pytest.mark.parametrize("name", ["get_weather", "now"])
def test_calls_in_words_are_of_these_tools_alone(either_tokenizer: Tokenizer, parser_name: str, name: str) -> None:
    factory, width = GrammarFactory(either_tokenizer), either_tokenizer.vocab_size
    tool = next(tool for tool in samples.TOOLS if tool["function"]["name"] == name)
    schema = tool["function"].get("parameters") or {"type": "object", "maxProperties": 0}
    opening = marker_tokens(parser_name)[0]
    for seed in range(5):
        grammar = factory.calls_in_words([tool], parser_name)
        ids = either_tokenizer.encode(f"Hello <tool [TOOL, <<{opening}", False)
        assert all(grammar.accept(index) for index in ids)
        assert not grammar.may_end
        ids += walk(grammar, either_tokenizer, random.Random(seed), width)
        content, calls = calls_of(parser_name, either_tokenizer.decode(ids, False))
        assert content.startswith("Hello <tool [TOOL, <<")
        assert {called for called, _ in calls} == {name}
        for _, arguments in calls:
            jsonschema.validate(json.loads(arguments), schema)


@EITHER_WAY
@pytest.mark.parametrize("parallel", [True, False])
def test_words_around_calls_are_free(either_tokenizer: Tokenizer, parallel: bool) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    other = call.replace("now", "get_weather")
    factory = GrammarFactory(either_tokenizer)

    def refused(text: str) -> str | None:
        """What is left of a text from the first token that is refused; None when it may be the whole output."""
        grammar = factory.calls_in_words([samples.TOOLS[1]], "hermes", parallel=parallel)
        ids = either_tokenizer.encode(text, False)
        for place, index in enumerate(ids):
            if not grammar.accept(index):
                return either_tokenizer.decode(ids[place:], False)
        return None if grammar.may_end else ""

    for text in ("", "Hello, world!\n", "<tool_cal <tool_call", "[TOOL_CALLS] x", call, f"  {call}"):
        assert refused(text) is None, text
    assert (refused(f"Hello{call}\nthere") is None) is parallel
    assert refused(f"<think>\n{other[:8]}</think>Hello{call}") is None
    assert refused(f"Hello {other}") not in (None, "")
    assert (refused(f"{call}\n{call} there{call}") is None) is parallel
    assert refused(f"{call} there{other}") not in (None, "")
    assert refused(call[:-3]) is not None


def test_the_opening_tag_is_not_spelled_where_it_is_a_token(factory: GrammarFactory, byte_tokenizer: Tokenizer) -> None:
    grammar = factory.calls_in_words([samples.TOOLS[1]], "hermes")
    ids = [byte_tokenizer.encode(char, False)[0] for char in "Hello <tool_call>"]
    assert byte_tokenizer.decode(ids) == "Hello <tool_call>"
    assert [grammar.accept(index) for index in ids] == [True] * (len(ids) - 1) + [False]
    first = set(allowed(factory.calls_in_words([samples.TOOLS[1]], "hermes")))
    tokens = {byte_tokenizer.token_id(text) for text in ("<think>", "</think>", "<tool_call>", "<|im_end|>", "<|im_start|>")}
    assert tokens - first == {byte_tokenizer.token_id("<|im_start|>")}
    assert calls_of("hermes", 'Hello <tool_call>{"name": "x", "arguments": {}}')[1] == [["x", "{}"]]


def test_refused_tools_of_calls_in_words(factory: GrammarFactory) -> None:
    with pytest.raises(GrammarError, match="'none' has no syntax"):
        factory.calls_in_words(samples.TOOLS, "none")
    with pytest.raises(GrammarError, match="no tools"):
        factory.calls_in_words([], "hermes")


def test_one_call_where_several_are_not_wanted(factory: GrammarFactory, byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', False)
    for parallel in (True, False):
        grammar = factory.tool_calls(samples.TOOLS, "required", "hermes", parallel=parallel)
        assert all(grammar.accept(index) for index in ids)
        assert grammar.may_end
        assert grammar.finished is not parallel


@pytest.mark.parametrize(
    ("tools", "choice", "name", "message"),
    [
        (samples.TOOLS, "fly", "hermes", "'fly', which is not among the tools"),
        (samples.TOOLS, "required", "none", "'none' has no syntax"),
        ([], "required", "hermes", "no tools"),
        ([{"type": "function", "function": {}}], "required", "hermes", r"function\.name"),
        ([{"function": {"name": "f", "parameters": {"type": "array"}}}], "f", "hermes", "type object"),
        ([{"function": {"name": "f", "parameters": {"required": ["x"]}}}], "f", "qwen3_xml", "'x' has no schema"),
        ([{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "strin"}}}}}], "f", "hermes", "Invalid type"),
    ],
)
def test_refused_tools(factory: GrammarFactory, tools: list[dict], choice: str, name: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        factory.tool_calls(tools, choice, name)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strin"}, "Invalid type"),
        ({"type": "object", "properties": 3}, "object"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "string", "pattern": "(?=a)b"}, "regex|pattern|look"),
        ({"not": {"type": "string"}}, "not"),
        ({"enum": ["x" * MAX_SCHEMA_BYTES]}, "the limit is"),
        ({"const": float("nan")}, "not JSON"),
    ],
)
def test_refused_schemas(factory: GrammarFactory, schema: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        factory.json_schema(schema)


def test_refused_patterns_and_depth(factory: GrammarFactory) -> None:
    with pytest.raises(GrammarError, match="unclosed group"):
        factory.regex("(a")
    with pytest.raises(GrammarError, match="the limit is"):
        factory.regex("a" * (MAX_PATTERN_CHARS + 1))
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(20_000):
        nested = {"type": "array", "items": nested}
    with pytest.raises(GrammarError, match="nested too deeply"):
        factory.json_schema(nested)


def test_deep_schemas(factory: GrammarFactory) -> None:
    nested: list[dict[str, Any]] = [{"type": "integer"}]
    for _ in range(200):
        nested.append({"type": "array", "items": nested[-1]})
    assert allowed(factory.json_schema(nested[40]))
    with pytest.raises(GrammarError, match="recursion limit"):
        factory.json_schema(nested[200])


@pytest.mark.parametrize("pattern", ["(a|aa)+b", "(.*a){50}", "((a{0,100}){0,100}){0,100}"])
def test_heavy_patterns_end(factory: GrammarFactory, byte_tokenizer: Tokenizer, pattern: str) -> None:
    token = byte_tokenizer.encode("a", False)[0]
    grammar = factory.regex(pattern)
    for _ in range(5):
        assert token in allowed(grammar)
        assert grammar.accept(token)


def test_pattern_past_the_limits_fails_while_it_runs(factory: GrammarFactory, byte_tokenizer: Tokenizer) -> None:
    grammar = factory.regex("(a{1000}){1000}")
    grammar.mask()
    with pytest.raises(GrammarError, match="too many expressions"):
        grammar.accept(byte_tokenizer.encode("a", False)[0])
    with pytest.raises(GrammarError, match="cannot go on"):
        grammar.mask()


def test_tokenizer_without_an_end_token(tmp_path: Path) -> None:
    factory = GrammarFactory(Tokenizer.load(samples.save(tmp_path, samples.byte_level_tokenizer(), {})))
    with pytest.raises(GrammarError, match="no end token"):
        factory.json_object()


def test_real_tokenizer(smollm_tokenizer: Tokenizer) -> None:
    grammar = GrammarFactory(smollm_tokenizer, 49160).json_schema(PERSON)
    text = '{"name": "Ada", "age": 36, "home": {"zip": "01234"}}'
    for index in smollm_tokenizer.encode(text, False):
        assert index in allowed(grammar, 49160)
        assert grammar.accept(index)
    assert allowed(grammar, 49160) == [2]
