import itertools
import json
from typing import Any

import pytest
import text_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_runtime.frontend.text.tools import choose_parser, marker_tokens, tool_parser


def parse(name: str, pieces: list[str], tools: list[dict[str, Any]] | None = None) -> tuple[str, list[tuple[str, str]]]:
    numbers = itertools.count()
    parser = tool_parser(name, tools, make_id=lambda: f"id{next(numbers)}")
    content, calls = "", []
    for text, deltas in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += text
        for delta in deltas:
            if delta.name is not None:
                assert (delta.index, delta.id) == (len(calls), f"id{len(calls)}")
                calls.append([delta.name, ""])
            else:
                assert delta.index == len(calls) - 1
                assert delta.id is None
                assert delta.arguments
            calls[-1][1] += delta.arguments
    return content, [(call[0], call[1]) for call in calls]


def cut(name: str, text: str, form: str) -> tuple[str, list[tuple[str, str]]]:
    """What a parser gives of an output that a grammar held to `form` and that ended here, however it was cut into pieces."""

    def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
        parser = tool_parser(name, TYPED, lambda: "id", form)
        content, calls = "", []
        for text, deltas in [*(parser.push(piece) for piece in pieces), parser.finish()]:
            content += text
            for delta in deltas:
                calls += [[delta.name, ""]] if delta.name else []
                calls[-1][1] += delta.arguments
        return content, [(call[0], call[1]) for call in calls]

    whole = read([text])
    assert read(list(text)) == whole
    return whole


def both_ways(name: str, text: str, tools: list[dict[str, Any]] | None = None) -> tuple[str, list[tuple[str, str]]]:
    whole = parse(name, [text], tools)
    assert parse(name, list(text), tools) == whole
    return whole


HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\"{", "b": [1, {}]}}\n</tool_call>'
HERMES_ARGS = '{"a": "}</tool_call>\\"{", "b": [1, {}]}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (HERMES, "", [("f", HERMES_ARGS)]),
        (f"Let me look.\n\n{HERMES}", "Let me look.", [("f", HERMES_ARGS)]),
        (f"{HERMES}\n{HERMES}\n", "", [("f", HERMES_ARGS)] * 2),
        (f"{HERMES}\nDone.", "\nDone.", [("f", HERMES_ARGS)]),
        ('<tool_call>{"arguments": {"x": "é"}, "name": "g"}</tool_call>', "", [("g", '{"x": "é"}')]),
        ('<tool_call>{"name": "g"}</tool_call>', "", [("g", "{}")]),
        ('<tool_call>{"name": "g", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("g", '{"x": 1}')]),
        ('<tool_call>{"name": "g", "arguments": {"x": 1}}', "", [("g", '{"x": 1}')]),
        ('<tool_call>{"name": "g", "arguments": {"x": 1}\n</tool_call>', "", [("g", '{"x": 1}')]),
        ('<tool_call>{"name": "g", "arguments": {"x": 1', "", [("g", '{"x": 1')]),
        ('<tool_call>{"name": "g\\u00e9", "arguments": {}}</tool_call> bye', " bye", [("gé", "{}")]),
        ('<tool_call>{"name": "g", "arguments": {"x": [1}}</tool_call>', "}}</tool_call>", [("g", '{"x": [1')]),
        ('<tool_call>{"name": "g", "arguments": {}, "id": "7"}</tool_call>', "", [("g", "{}")]),
    ],
)
def test_hermes_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert both_ways("hermes", text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "plain text \n",
        "a <tool_call> b",
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>\n',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"nam',
        "x <tool_ca",
        '<tool_call>{"name" "f"}}</tool_call>',
        "the tag <tool_call> opens; \n</tool_call> closes",
    ],
)
def test_hermes_what_is_no_call_is_content(text: str) -> None:
    assert both_ways("hermes", text) == (text, [])


def test_hermes_call_after_a_malformed_one() -> None:
    text = f"<tool_call>oops {HERMES}"
    assert both_ways("hermes", text) == ("<tool_call>oops", [("f", HERMES_ARGS)])


def test_hermes_streams_name_then_fragments() -> None:
    parser = tool_parser("hermes")
    _, deltas = parser.push('<tool_call>\n{"name": "f", "arguments": {')
    assert [delta.name for delta in deltas] == ["f", None]
    assert (deltas[0].id or "").startswith("call_")
    assert parser.push('"a": 1')[1][0].arguments == '"a": 1'
    assert [delta.arguments for delta in parser.push("}}\n</tool_call>")[1]] == ["}"]


XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\n São\nPaulo \n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=tags>\n["a", "1"]\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>'
)
XML_VALUE = {"city": " São\nPaulo ", "days": 3, "tags": ["a", "1"], "exact": True}


def test_xml_values_are_typed_by_the_schema() -> None:
    content, calls = both_ways("qwen3_xml", f"Sure.\n{XML}\n{XML}", samples.TOOLS)
    assert content == "Sure."
    assert [name for name, _ in calls] == ["get_weather"] * 2
    assert all(json.loads(arguments) == XML_VALUE for _, arguments in calls)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, '"q"', '"q"'),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "12.0", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "number"}, "12", 12),
        ({"type": "number"}, "1e2", 100.0),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, " true", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "7", "7"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "array"}, "[1,", "[1,"),
        ({"$ref": "#/$defs/n"}, "5", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({}, "5", "5"),
        ({"type": "number"}, "NaN", "NaN"),
    ],
)
def test_xml_types(schema: dict, text: str, value: object) -> None:
    parameters = {"type": "object", "properties": {"p": schema}, "$defs": {"n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    call = f"<tool_call>\n<function=f>\n<parameter=p>\n{text}\n</parameter>\n</function>\n</tool_call>"
    _, [(_, arguments)] = both_ways("qwen3_xml", call, tools)
    assert json.loads(arguments) == {"p": value}
    assert type(json.loads(arguments)["p"]) is type(value)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<tool_call><function=f></function></tool_call>", "", [("f", "{}")]),
        ("<tool_call>\n<function=f>\n</function>\n", "", [("f", "{}")]),
        ("<tool_call><function=f><parameter=a>1</parameter></function>\nok", "\nok", [("f", '{"a": "1"}')]),
        ("<tool_call><function=f><parameter=a>1</parameter> junk", " junk", [("f", '{"a": "1"}')]),
        ("<tool_call><function=f><parameter=a>1", "<parameter=a>1", [("f", "")]),
        ("<tool_call><function=f><parameter=a>1</parameter><param", "<param", [("f", '{"a": "1"')]),
        ("a <tool_call> b", "a <tool_call> b", []),
        ("<tool_call>\n<function=", "<tool_call>\n<function=", []),
        ("<tool_call>\n<function=\n>", "<tool_call>\n<function=\n>", []),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', '<tool_call>\n{"name": "f"}\n</tool_call>', []),
        ("<tool_call>x <tool_call><function=f></function></tool_call>", "<tool_call>x", [("f", "{}")]),
    ],
)
def test_xml_shapes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert both_ways("qwen3_xml", text) == (content, calls)


def test_xml_emits_a_parameter_when_it_is_whole() -> None:
    parser = tool_parser("qwen3_xml")
    assert [delta.name for delta in parser.push("<tool_call>\n<function=f>")[1]] == ["f"]
    assert parser.push("\n<parameter=a>\nlong val")[1] == []
    assert [delta.arguments for delta in parser.push("ue\n</parameter>\n")[1]] == ['{"a": "long value"']
    assert [delta.arguments for delta in parser.push("</function>\n</tool_call>")[1]] == ["}"]


MISTRAL = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"arguments": {}, "name": "g"}]'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (MISTRAL, "", [("f", '{"a": "]"}'), ("g", "{}")]),
        (f"Yes. {MISTRAL} bye", "Yes. bye", [("f", '{"a": "]"}'), ("g", "{}")]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}, oops', ", oops", [("f", "{}")]),
        ("[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
        ("[TOOL_CALLS] [1]", "[TOOL_CALLS] [1]", []),
        ("[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
        ('[TOOL_CALLS] [{"name"', '[TOOL_CALLS] [{"name"', []),
        ("see [TOOL_CALLS", "see [TOOL_CALLS", []),
    ],
)
def test_mistral(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert both_ways("mistral", text) == (content, calls)


def test_plain_ids_and_names() -> None:
    assert both_ways("none", HERMES) == (HERMES, [])
    call_id = tool_parser("mistral").push(MISTRAL)[1][0].id or ""
    assert len(call_id) == 9
    assert call_id.isalnum()
    with pytest.raises(ValueError, match="known: hermes, qwen3_xml, mistral, none"):
        tool_parser("guess")


@pytest.mark.parametrize(
    ("template", "family", "name"),
    [
        (samples.CHATML, "qwen3_moe", "hermes"),
        (samples.XML_MACRO, "qwen3_5_moe", "qwen3_xml"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mixtral", "mistral"),
        (samples.INST, "mixtral", "none"),
        ("{{ tools | tojson }}", "qwen3_next", "hermes"),
        ("{{ tools | tojson }}", "qwen3_5_moe", "qwen3_xml"),
        ("{{ tools | tojson }}", "llama", "none"),
        ("", "qwen3_moe", "none"),
    ],
)
def test_choose_parser(template: str, family: str, name: str) -> None:
    assert choose_parser(template, family) == name
    assert marker_tokens(name) == {"none": (), "mistral": ("[TOOL_CALLS]",)}.get(name, ("<tool_call>", "</tool_call>"))


PIECES = {
    "hermes": [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": ',
        '{"a": 1}',
        "}",
        "{",
        '"',
        "\n",
        "x",
        "<",
        "]",
        HERMES,
    ],
    "qwen3_xml": [
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "\n",
        "x",
        "<",
        XML,
    ],
    "mistral": ["[TOOL_CALLS]", "[", '{"name": "f", "arguments": ', '{"a": 1}', "}", ",", "]", " ", "x", "[TOOL", MISTRAL],
}


@pytest.mark.parametrize("name", list(PIECES))
@given(data=st.data(), cuts=st.lists(st.integers(0, 400), max_size=12))
@settings(max_examples=250, deadline=None)
def test_cuts_change_nothing(name: str, data: st.DataObject, cuts: list[int]) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES[name]), max_size=10)))
    whole = both_ways(name, text, samples.TOOLS)
    assert parse(name, samples.pieces_of(text, cuts), samples.TOOLS) == whole
    if not whole[1]:
        assert whole[0] == text


TYPED = [{"type": "function", "function": {"name": "get", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
FORCED = {
    "hermes": '<tool_call>\n{"name": "get", "arguments": {"a": 12, "b": "x<y"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "get", "arguments": {"a": 12, "b": "x<y"}}]',
    "qwen3_xml": "<tool_call>\n<function=get>\n<parameter=a>\n12\n</parameter>\n"
    "<parameter=b>\nx<y\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("form", ["calls", "calls or json"])
@pytest.mark.parametrize("name", FORCED)
def test_a_forced_call_never_comes_out_as_content_wherever_it_is_cut(name: str, form: str) -> None:
    text = FORCED[name]
    named = text.index(">", text.index("get")) + 1 if name == "qwen3_xml" else text.index('get"') + 4
    for size in range(len(text) + 1):
        content, calls = cut(name, text[:size], form)
        assert content == ""
        assert [call[0] for call in calls] == (["get"] if size >= named else [])
        assert all('{"a": 12, "b": "x<y"}'.startswith(arguments) for _, arguments in calls)
    assert cut(name, text, form) == ("", [("get", '{"a": 12, "b": "x<y"}')])


@pytest.mark.parametrize("name", FORCED)
def test_json_that_quotes_a_call_is_content(name: str) -> None:
    for text in (json.dumps([FORCED[name]]), json.dumps(FORCED[name]), "[[1]]"):
        assert cut(name, text, "calls or json") == (text, [])
