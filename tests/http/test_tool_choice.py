"""`tool_choice`: some of the tools (OpenAI's allowed_tools), and Mistral's word for `required`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionAllowedToolChoiceParam

from tests.http.conftest import Stack
from tests.http.test_chat import BOTH_WAYS, CALL, read_choice
from tests.http.test_errors import check_error

CITY = {"const": {"city": "Paris"}}
NAMES = ("get_weather", "get_time", "get_news")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in NAMES]
ARGUMENTS = '{"city": "Paris"}'


def allowed(mode: str, *names: str) -> ChatCompletionAllowedToolChoiceParam:
    tools: list[dict[str, object]] = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "required" if mode == "required" else "auto", "tools": tools}}


def names_of(stack: Stack, *, stream: bool, **fields: Any) -> tuple[str, list[str], str]:
    """Content, names of the calls, and finish_reason; every call must have the arguments that its schema asks for."""
    content, calls, finish = read_choice(stack, stream=stream, tools=TOOLS, **fields)
    assert all(json.loads(arguments) == {"city": "Paris"} for _, arguments in calls)
    return content, [name for name, _ in calls], finish


@BOTH_WAYS
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_call_of_an_allowed_tool(stack: Stack, stream: bool, mode: str) -> None:
    stack.output = CALL
    choice = allowed(mode, "get_time", "get_weather")
    assert names_of(stack, stream=stream, tool_choice=choice) == ("", ["get_weather"], "tool_calls")
    # The model is told of all tools, so that what is allowed may change from turn to turn without another prompt.
    prompt = stack.tokenizer.decode(stack.engine.submits(1)[0].prompt)
    assert all(name in prompt for name in NAMES)


@BOTH_WAYS
@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("wanted", ["get_weather", "get_news", "get_nothing"])
def test_the_grammar_has_no_other_tool(stack: Stack, stream: bool, mode: str, wanted: str) -> None:
    """The model wants one that is not allowed, and then an end; what it may write instead is the one that is."""
    stack.output = [*stack.tokenizer.encode(CALL[: CALL.index("get_weather")] + wanted, False), *[stack.eos] * 60]
    choice = allowed(mode, "get_time")
    assert names_of(stack, stream=stream, tool_choice=choice) == ("", ["get_time"], "tool_calls")


@BOTH_WAYS
def test_words_and_several_calls_where_a_call_is_not_required(stack: Stack, stream: bool) -> None:
    choice = allowed("auto", "get_weather", "get_news")
    assert names_of(stack, stream=stream, tool_choice=choice) == (stack.output, [], "stop")
    stack.output = f"Let me see. {CALL}\n{CALL.replace('get_weather', 'get_news')}"
    assert names_of(stack, stream=stream, tool_choice=choice) == ("Let me see.", ["get_weather", "get_news"], "tool_calls")
    one = names_of(stack, stream=stream, tool_choice=choice, parallel_tool_calls=False)
    assert one == ("Let me see.", ["get_weather"], "tool_calls")
    stack.output = f"one</think>Two. {CALL}"
    thinking = {"chat_template_kwargs": {"thinking": True}}
    assert names_of(stack, stream=stream, tool_choice=choice, extra_body=thinking)[:2] == ("Two.", ["get_weather"])


@BOTH_WAYS
def test_allowed_tools_beside_a_response_format(stack: Stack, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": CITY}}
    stack.output = ARGUMENTS
    content, names, finish = names_of(stack, stream=stream, tool_choice=allowed("auto", "get_time"), response_format=form)
    assert (content, names, finish) == (ARGUMENTS, [], "stop")
    stack.output = CALL
    _, names, _ = names_of(
        stack, stream=stream, tool_choice=allowed("auto", "get_time"), response_format=form, parallel_tool_calls=False
    )
    assert names == ["get_time"]


def test_allowed_tools_may_be_whole_definitions(stack: Stack) -> None:
    """The client's reference speaks of tool definitions; what counts is the one in `tools`."""
    stack.output = CALL
    other = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": {"type": "object"}}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [other, TOOLS[0]]}}
    assert names_of(stack, stream=False, tool_choice=choice)[1] == ["get_weather"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_an_unknown_name_is_named(stack: Stack, mode: str) -> None:
    for name in ("get_lost", "sp ace", ""):
        error = check_error(stack.chat(tools=TOOLS, tool_choice=allowed(mode, "get_time", name)), 400, "tool_choice")
        assert error["message"] == f"tool_choice names {name!r}, which is not in tools"
    assert stack.engine.received == []


@BOTH_WAYS
def test_any_is_required(stack: Stack, stream: bool) -> None:
    answers = []
    for choice in ("any", "required"):
        stack.output = "The quick brown fox"
        answers.append(names_of(stack, stream=stream, tool_choice=choice, seed=1, max_tokens=60, parallel_tool_calls=False))
        stack.output = CALL
        assert names_of(stack, stream=stream, tool_choice=choice)[:2] == ("", ["get_weather"])
    assert answers[0] == answers[1]
    assert len(answers[0][1]) == 1
    error = check_error(stack.chat(tool_choice="any"), 400, "tool_choice")
    assert error["message"] == "tool_choice is only allowed when tools are given"
