"""/v1/chat/completions through the official client."""

from __future__ import annotations

import json
from collections.abc import Callable

import openai
import pytest
from pydantic import BaseModel

from ep_runtime.frontend.sampling import derive_seed
from tests.http.conftest import TEXT, Stack

MakeStack = Callable[..., Stack]

USER = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}}]
BOTH_WAYS = pytest.mark.parametrize("stream", [False, True])
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_answer_and_usage(stack: Stack) -> None:
    answer = stack.client().chat.completions.create(model="tiny", messages=USER, seed=7, temperature=0)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    submit = stack.engine.submits(1)[0]
    assert (
        stack.tokenizer.decode(submit.prompt, skip_special_tokens=False)
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert submit.sampling.seed == derive_seed(7, 0)
    assert submit.sampling.temperature == 0
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(submit.prompt)
    assert answer.usage.completion_tokens == len(stack.tokenizer.encode(TEXT, False)) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert submit.sampling.max_tokens == 512 - len(submit.prompt)


def test_stream_equals_whole_and_ends_with_usage(stack: Stack) -> None:
    stream = stack.client().chat.completions.create(
        model="alias", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["stop"]
    assert {chunk.model for chunk in chunks} == {"alias"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_characters_of_several_tokens_stay_whole(stack: Stack) -> None:
    stack.output = "naïve 日本語 😀!"
    stream = stack.client().chat.completions.create(model="tiny", messages=USER, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == "naïve 日本語 😀!"
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_cuts_and_aborts(stack: Stack, stream: bool) -> None:
    fields = {"stop": ["lazy", "never"], "return_token_ids": True}
    if stream:
        lines = [line for line in stack.chat(stream=True, **fields).text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line[6:])["choices"][0] for line in lines]
        text, last = "".join(choice["delta"].get("content", "") for choice in choices), choices[-1]
    else:
        last = stack.chat(**fields).json()["choices"][0]
        text = last["message"]["content"]
    assert text == TEXT[: TEXT.index("lazy")]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "lazy")
    stack.engine.aborted(stack.engine.submits(1)[0].request_id)


def test_stop_string_included_on_request(stack: Stack) -> None:
    answer = stack.chat(stop="lazy", include_stop_str_in_output=True).json()
    assert answer["choices"][0]["message"]["content"] == TEXT[: TEXT.index("lazy") + 4]


def test_stop_token_id(stack: Stack) -> None:
    ids = stack.tokenizer.encode(TEXT, False)
    token = ids[5]
    answer = stack.chat(stop_token_ids=[token], return_token_ids=True).json()
    choice = answer["choices"][0]
    end = ids.index(token)
    assert choice["token_ids"] == ids[: end + 1]
    assert choice["message"]["content"] == stack.tokenizer.decode(ids[:end])
    assert choice["stop_reason"] == token
    assert answer["prompt_token_ids"] == stack.engine.submits(1)[0].prompt


def test_n_samples_have_their_own_seeds(stack: Stack) -> None:
    answer = stack.client().chat.completions.create(model="tiny", messages=USER, n=3, seed=11, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    submits = stack.engine.submits(3)
    assert [submit.sampling.seed for submit in submits] == [derive_seed(11, index) for index in range(3)]
    assert len({submit.group for submit in submits}) == 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == len(submits[0].prompt)


def test_drawn_seeds_differ(stack: Stack) -> None:
    for _ in range(2):
        assert stack.chat(max_tokens=1).status_code == 200
    first, second = stack.engine.submits(2)
    assert first.sampling.seed != second.sampling.seed


def test_n_streams_interleave(stack: Stack) -> None:
    texts = {0: "", 1: ""}
    for chunk in stack.client().chat.completions.create(model="tiny", messages=USER, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: TEXT, 1: TEXT}


def test_logprobs(stack: Stack) -> None:
    answer = stack.client().chat.completions.create(model="tiny", messages=USER, logprobs=True, top_logprobs=2, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [-0.25] * 3
    assert [[top.logprob for top in entry.top_logprobs] for entry in logprobs.content] == [[-0.25, -1.5]] * 3
    data = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert data.decode() == answer.choices[0].message.content
    assert stack.engine.submits(1)[0].sampling.logprobs == 2


def test_prompt_logprobs(stack: Stack) -> None:
    body = stack.chat(prompt_logprobs=1, max_tokens=1).json()
    prompt = stack.engine.submits(1)[0].prompt
    assert body["prompt_logprobs"][0] is None
    assert [next(iter(row)) for row in body["prompt_logprobs"][1:]] == [str(token) for token in prompt[1:]]


REASONING_NAMES = ("reasoning", "reasoning_content")


def test_reasoning_is_split_out_under_both_names(stack: Stack) -> None:
    stack.output = "<think>\none two\n</think>\n\nThe lazy dog."
    message = stack.client().chat.completions.create(model="tiny", messages=USER).choices[0].message
    assert [getattr(message, name) for name in REASONING_NAMES] == ["one two"] * 2
    assert message.content == "The lazy dog."
    stream = stack.client().chat.completions.create(model="tiny", messages=USER, stream=True)
    deltas = [chunk.choices[0].delta.model_dump() for chunk in stream]
    for name in REASONING_NAMES:
        assert "".join(delta.get(name) or "" for delta in deltas) == "one two"
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    assert "".join(delta.get("content") or "" for delta in deltas) == "The lazy dog."
    # The next turn takes the answer back as the client holds it, both names in it.
    assert set(REASONING_NAMES) <= set(message.model_dump())
    again = stack.client().chat.completions.create(model="tiny", messages=[*USER, message, *USER], max_tokens=1)
    assert again.choices[0].finish_reason == "length"


@BOTH_WAYS
def test_an_answer_without_reasoning_has_neither_name(stack: Stack, stream: bool) -> None:
    assert "reasoning" not in stack.chat(stream=stream).text


def test_tool_call_auto(stack: Stack) -> None:
    stack.output = "Let me see. " + CALL
    answer = stack.client().chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert "get_weather" in stack.tokenizer.decode(stack.engine.submits(1)[0].prompt)
    # The next turn takes the answer back as the client holds it.
    turn = [*USER, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    stack.output = "It is sunny."
    again = stack.client().chat.completions.create(model="tiny", messages=turn, tools=TOOLS)
    assert again.choices[0].message.content == "It is sunny."
    assert again.choices[0].finish_reason == "stop"


def test_tool_call_stream(stack: Stack) -> None:
    stack.output = CALL + "\n" + CALL.replace("Paris", "Rome")
    calls: dict[int, dict[str, str]] = {}
    for chunk in stack.client().chat.completions.create(model="tiny", messages=USER, tools=TOOLS, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.function is not None
            call = calls.setdefault(delta.index, {"name": "", "arguments": ""})
            call["name"] += delta.function.name or ""
            call["arguments"] += delta.function.arguments or ""
        finish = chunk.choices[0].finish_reason
    assert finish == "tool_calls"
    assert [json.loads(call["arguments"])["city"] for call in calls.values()] == ["Paris", "Rome"]
    assert {call["name"] for call in calls.values()} == {"get_weather"}


def test_parallel_tool_calls_false_keeps_the_first(stack: Stack) -> None:
    stack.output = CALL + "\n" + CALL.replace("Paris", "Rome")
    calls = stack.chat(tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"])["city"] for call in calls] == ["Paris"]


def test_tool_choice_none_offers_no_tools(stack: Stack) -> None:
    stack.output = CALL
    message = stack.chat(tools=TOOLS, tool_choice="none").json()["choices"][0]["message"]
    assert message["content"] == CALL
    assert "get_weather" not in stack.tokenizer.decode(stack.engine.submits(1)[0].prompt)


@pytest.mark.parametrize(
    ("choice", "finish"), [("required", "tool_calls"), ({"type": "function", "function": {"name": "get_weather"}}, "stop")]
)
def test_forced_tool_call_follows_the_grammar(stack: Stack, choice: object, finish: str) -> None:
    stack.output = CALL
    body = stack.chat(tools=TOOLS, tool_choice=choice).json()["choices"][0]
    assert json.loads(body["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert body["finish_reason"] == finish
    assert stack.engine.submits(1)[0].sampling.grammar


def test_json_schema_masks_every_token(stack: Stack) -> None:
    # The engine would rather end at once; the mask lets it end only where the value is complete.
    stack.output = [stack.eos] * 30
    schema = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False}
    answer = stack.client().chat.completions.create(
        model="tiny",
        messages=USER,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content or "") == {"ok": True}
    assert answer.choices[0].finish_reason == "stop"


def test_json_object_and_thinking(stack: Stack) -> None:
    stack.output = 'one two</think>{"city": "Paris"}'
    message = stack.chat(response_format={"type": "json_object"}, chat_template_kwargs={"thinking": True}).json()["choices"][0][
        "message"
    ]
    assert message["reasoning_content"] == "one two"
    assert json.loads(message["content"]) == {"city": "Paris"}


def test_continue_final_message(stack: Stack) -> None:
    messages = [*USER, {"role": "assistant", "content": "The quick"}]
    assert stack.chat(messages=messages, continue_final_message=True, max_tokens=1).status_code == 200
    assert stack.tokenizer.decode(stack.engine.submits(1)[0].prompt, skip_special_tokens=False).endswith("assistant\nThe quick")


def test_sampling_fields_reach_the_engine(stack: Stack) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    assert stack.chat(**fields, logit_bias={"5": -100}, max_completion_tokens=9, priority=-4).status_code == 200
    submit = stack.engine.submits(1)[0]
    assert {name: getattr(submit.sampling, name) for name in fields} == fields
    assert submit.sampling.logit_bias == {5: -100.0}
    assert submit.sampling.max_tokens == 9
    assert submit.priority == -4


def test_content_parts_and_harmless_fields(stack: Stack) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "seven"}, {"role": "user", "content": parts}]
    answer = stack.chat(messages=messages, user="u", store=False, metadata={"a": "b"}, service_tier="auto", max_tokens=1)
    assert answer.status_code == 200
    prompt = stack.tokenizer.decode(stack.engine.submits(1)[0].prompt, skip_special_tokens=False)
    assert "user\none\ntwo<|im_end|>" in prompt
    assert "<|im_start|>system\nseven" in prompt


def read_choice(stack: Stack, *, stream: bool, **fields: object) -> tuple[str, list[list[str]], str]:
    """Content, calls as name and arguments, and finish_reason."""
    answer = stack.client().chat.completions.create(model="tiny", messages=USER, stream=stream, **fields)
    if not stream:
        choice = answer.choices[0]
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]
        return choice.message.content or "", calls, choice.finish_reason
    content, calls, finish = "", [], ""
    for chunk in answer:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or []:
            calls += [[call.function.name, ""]] if call.function.name else []
            calls[-1][1] += call.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    return content, calls, finish


@BOTH_WAYS
@pytest.mark.parametrize(
    "held", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}], ids=["calls", "either"]
)
def test_a_forced_call_that_is_cut_is_never_content(stack: Stack, stream: bool, held: dict[str, object]) -> None:
    stack.output = CALL
    ids = stack.tokenizer.encode(CALL, False)
    named = len(CALL[: CALL.index('get_weather"') + len('get_weather"')])
    for size in range(1, len(ids), 3):
        content, calls, finish = read_choice(stack, stream=stream, tools=TOOLS, max_tokens=size, **held)
        assert (content, finish) == ("", "length")
        assert [name for name, _ in calls] == (["get_weather"] if len(stack.tokenizer.decode(ids[:size])) >= named else [])
        assert all('{"city": "Paris"}'.startswith(arguments) for _, arguments in calls)


QUOTE = "Say <tool_call> first."
FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {"type": "object", "properties": {"text": {"const": QUOTE}}, "required": ["text"], "additionalProperties": False},
    },
}


@BOTH_WAYS
def test_response_format_with_tools_takes_a_call_or_the_schema(stack: Stack, stream: bool) -> None:
    stack.output = CALL
    content, calls, finish = read_choice(stack, stream=stream, tools=TOOLS, response_format=FORM)
    assert (content, calls, finish) == ("", [["get_weather", '{"city": "Paris"}']], "tool_calls")
    stack.output = json.dumps({"text": QUOTE})
    content, calls, finish = read_choice(stack, stream=stream, tools=TOOLS, response_format=FORM, tool_choice="auto")
    assert (json.loads(content), calls, finish) == ({"text": QUOTE}, [], "stop")
    assert all(submit.sampling.grammar for submit in stack.engine.submits(2))
    stack.output = f"one</think>{CALL}"
    thinking = {"chat_template_kwargs": {"thinking": True}}
    content, calls, finish = read_choice(stack, stream=stream, tools=TOOLS, response_format=FORM, extra_body=thinking)
    assert (content, calls, finish) == ("", [["get_weather", '{"city": "Paris"}']], "tool_calls")
    # Words that are neither are not allowed.
    stack.output = "Paris."
    content, calls, _ = read_choice(stack, stream=stream, tools=TOOLS, response_format=FORM)
    assert calls or json.loads(content) == {"text": QUOTE}


def test_a_forced_call_outweighs_the_response_format(stack: Stack) -> None:
    stack.output = json.dumps({"text": QUOTE})
    _, calls, _ = read_choice(stack, stream=False, tools=TOOLS, response_format=FORM, tool_choice="required", max_tokens=60)
    assert [name for name, _ in calls] == ["get_weather"]
    content, calls, _ = read_choice(stack, stream=False, tools=TOOLS, response_format=FORM, tool_choice="none")
    assert (json.loads(content), calls) == ({"text": QUOTE}, [])


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_an_earlier_turn_is_taken_under_both_names(make_stack: MakeStack, name: str) -> None:
    template = "{% for m in messages %}{{ m.reasoning }}|{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    stack = make_stack(chat_template=template)
    stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    turn = {"role": "assistant", "content": "Paris", name: "one two"}
    assert stack.chat(messages=[turn, {"role": "user", "content": "Hi"}], max_tokens=1).status_code == 200
    assert stack.tokenizer.decode(stack.engine.submits(1)[0].prompt) == "one two|one two|Paris||Hi"
    assert stack.chat(messages=[turn | {"reasoning": "one two"}], max_tokens=1).status_code == 200


def test_cache_control_changes_nothing(make_stack: MakeStack) -> None:
    """Anthropic's clients mark parts, messages and tools with it, and proxies pass it on."""
    stack = make_stack(chat_template="{{ messages | tojson }}{{ tools | tojson }}", tool_call_parser="hermes")
    stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    for mark in ({}, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}, {"cache_control": None}):
        messages = [
            {"role": "system", "content": [{"type": "text", "text": "s", **mark}], **mark},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", **mark}], **mark},
            {"role": "assistant", "content": [{"type": "text", "text": "c", **mark}, {"type": "refusal", "refusal": "d", **mark}]},
            {"role": "tool", "content": [{"type": "text", "text": "e", **mark}], "tool_call_id": "x", **mark},
        ]
        tools = [{"type": "function", "function": {"name": "f", **mark}, **mark}]
        answer = stack.client().chat.completions.create(model="tiny", messages=messages, tools=tools, max_tokens=1)
        assert answer.choices[0].finish_reason == "length"
        assert (
            stack.http.post("/tokenize", json={"messages": messages, "tools": tools}).json()["count"] == answer.usage.prompt_tokens
        )
    plain, *marked = [submit.prompt for submit in stack.engine.submits(3)]
    assert marked == [plain, plain]
    assert "cache" not in stack.tokenizer.decode(plain)


NEUTRAL_FIELDS = {
    "best_of": 1,
    "suffix": "",
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "bad_words": [],
    "logits_processors": [],
    "return_tokens_as_token_ids": False,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "stop": [],
    "stop_token_ids": [],
    "logit_bias": {},
    "echo": False,
}
NEUTRAL_CHAT = {
    "functions": [],
    "function_call": "none",
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "top_logprobs": 0,
    "logprobs": False,
    "documents": [],
    "include_reasoning": True,
    "mm_processor_kwargs": {},
    "modalities": ["text"],
}


def test_neutral_values_of_unsupported_fields_are_taken(stack: Stack) -> None:
    assert stack.complete(**NEUTRAL_FIELDS, max_tokens=1).status_code == 200
    assert stack.chat(**NEUTRAL_FIELDS, **NEUTRAL_CHAT, max_tokens=1).status_code == 200
    for wanted in (True, None):
        options = {"include_usage": wanted, "continuous_usage_stats": False}
        answer = stack.chat(stream=True, stream_options=options, max_tokens=1)
        assert (answer.status_code, "prompt_tokens" in answer.text) == (200, wanted is True)


def test_tools_are_refused_by_a_model_without_them(make_stack: MakeStack) -> None:
    stack = make_stack(tool_call_parser="none")
    stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    with pytest.raises(openai.BadRequestError, match="tools are not supported") as refused:
        stack.client().chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
    assert refused.value.param == "tools"


class Weather(BaseModel):
    """The city's."""

    city: str


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own, for the object that it has parsed
def test_what_the_clients_parse_gives_may_be_sent_back(make_stack: MakeStack) -> None:
    stack = make_stack(chat_template="{{ messages | tojson }}", tool_call_parser="hermes")
    stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    parse = stack.client().chat.completions.parse
    stack.output = '{"city": "Paris"}'
    said = parse(model="tiny", messages=USER, response_format=Weather).choices[0].message
    stack.output = CALL.replace("get_weather", "Weather")
    called = parse(model="tiny", messages=USER, tools=[openai.pydantic_function_tool(Weather)]).choices[0].message
    assert (said.parsed, called.tool_calls[0].function.parsed_arguments) == (Weather(city="Paris"), Weather(city="Paris"))
    for message in (said, called, said.model_dump(), called.model_dump()):
        again = stack.client().chat.completions.create(model="tiny", messages=[*USER, message, *USER], max_tokens=1)
        assert again.choices[0].finish_reason == "length"
    prompts = [stack.tokenizer.decode(submit.prompt) for submit in stack.engine.submits(6)[2:]]
    assert all("Paris" in prompt and "parsed" not in prompt for prompt in prompts)


def test_a_refusal_is_a_text_of_the_assistant(stack: Stack) -> None:
    turn = {"role": "assistant", "content": [{"type": "refusal", "refusal": "one"}, {"type": "text", "text": "two"}]}
    assert stack.chat(messages=[*USER, turn, *USER], max_tokens=1, model="").status_code == 200
    assert "assistant\none\ntwo<|im_end|>" in stack.tokenizer.decode(stack.engine.submits(1)[0].prompt, False)
