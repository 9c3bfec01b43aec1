import copy
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import text_samples as samples
from transformers import PreTrainedTokenizerFast

from ep_runtime.frontend.text.errors import TemplateError
from ep_runtime.frontend.text.template import ChatTemplate

USER = [{"role": "user", "content": "Hi <b> é"}]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\ntwo "},
    {"role": "user", "content": "2+2?"},
]


def reference(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """What transformers makes of it."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=samples.byte_level_tokenizer(), bos_token="<s>", eos_token="</s>")
    options.setdefault("add_generation_prompt", True)
    return tokenizer.apply_chat_template(copy.deepcopy(messages), chat_template=template, tokenize=False, **options)


def render(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


@pytest.mark.parametrize("template", [samples.CHATML, samples.XML_MACRO, samples.INST], ids=["chatml", "xml", "inst"])
@pytest.mark.parametrize("messages", [USER, TURNS, TURNS[1:]], ids=["user", "turns", "no_system"])
@pytest.mark.parametrize("prompt", [True, False])
def test_rendering_is_transformers(template: str, messages: list[dict[str, Any]], prompt: bool) -> None:
    options = {"add_generation_prompt": prompt}
    assert render(template, messages, **options) == reference(template, messages, **options)


@pytest.mark.parametrize("template", [samples.CHATML, samples.XML_MACRO], ids=["chatml", "xml"])
def test_tool_conversation_in_openai_form(template: str) -> None:
    theirs = reference(template, samples.CALLS, tools=samples.TOOLS)
    wire = json.loads(json.dumps(samples.CALLS))
    for call in wire[2]["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    before = copy.deepcopy(wire)
    assert render(template, wire, tools=samples.TOOLS) == theirs
    assert wire == before
    assert "Zürich <x>" in theirs


def test_template_variables() -> None:
    theirs = reference(samples.CHATML, USER, enable_thinking=False)
    assert render(samples.CHATML, USER, kwargs={"enable_thinking": False}) == theirs
    assert theirs.endswith("<think>\n\n</think>\n\n")
    documents = [{"title": "t", "text": "x"}]
    template = "{% for d in documents %}{{ d.title }}{% endfor %}{{ messages | length }}"
    assert render(template, USER, documents=documents) == reference(template, USER, documents=documents) == "t1"
    with pytest.raises(TemplateError, match="may not set messages"):
        render(samples.CHATML, USER, kwargs={"messages": []})


@pytest.mark.parametrize("content", ["The answer", "The answer \n", "", "a The answer"])
@pytest.mark.parametrize("template", [samples.CHATML, samples.INST, samples.XML_MACRO], ids=["chatml", "inst", "xml"])
def test_continued_message_is_transformers(template: str, content: str) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(template, messages, **options) == reference(template, messages, **options)


def test_continued_message_that_the_template_drops() -> None:
    messages = [*USER, {"role": "assistant", "content": "gone"}]
    with pytest.raises(TemplateError, match="does not keep"):
        render("{{ messages[0].content }}", messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(TemplateError, match="exclude each other"):
        render(samples.CHATML, messages, continue_final_message=True)


@pytest.mark.parametrize(
    "expression",
    [
        "{{ {'b': 1, 'a': ['<é>', none, true]} | tojson }}",
        "{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}",
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% if loop.first %}{% continue %}{% endif %}x{%- endfor %}",
        "{% for m in messages %}{{ loop.last }}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.revindex }}{{ m.content }}{% else %}none{% endfor %}",
        "{% for k, v in messages[0].items() %}{{ k ~ '=' ~ v ~ ',' }}{% endfor %}",
        "{% for x in undefined_name %}x{% else %}empty{% endfor %}",
        "{% generation %}{{ messages[0].content | upper }}{% endgeneration %}",
        "{{ '%s-%05.1f' | format('a', 2.5) }}{{ '{:>5}|{}'.format('x', 1) }}{{ 'a%db' % 3 }}",
        "{{ 'ab' * 3 }}{{ 7 // 2 }}{{ 2 ** 10 }}{{ [1] + [2] }}{{ 7 % 4 }}{{ 1.5 * 2 }}",
        "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "{{ 'a,b'.split(',') | last | capitalize }}{{ 'aXbX'.replace('X', '--') }}{{ 'abc'[::-1] }}{{ 'x'.join(['1', '2']) }}",
        "{%- macro m(x, y=2) -%}{{ x }}{{ y }}{{ caller() if caller }}{%- endmacro %}{{ m(1) }}{% call m(3) %}c{% endcall %}",
        "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
        "{%- for c in [[1, [2]], 3] recursive %}{{ loop(c) if c is iterable else c }},{% endfor %}",
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ 'a\n  b' | indent(2) }}{{ 'ab' | center(6) }}{{ [3, 1] | sort | first }}",
        "  {% if true %}\n  trimmed\n  {% endif %}\n{# note #}\n end",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_language_of_templates_is_transformers(expression: str) -> None:
    messages = [*USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    assert render(expression, messages) == reference(expression, messages)


def test_date_comes_from_the_clock() -> None:
    template = ChatTemplate({"default": "{{ strftime_now('%d %b %Y') }}"}, now=lambda: datetime(2026, 1, 5))
    assert template.render(USER) == "05 Jan 2026"


def test_content_forms() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render("{{ messages[0].content }}", parts) == "a\nb"
    assert render(samples.XML_MACRO, parts, add_generation_prompt=False) == "<|im_start|>user\nab<|im_end|>\n"
    lists_only = "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endfor %}"
    assert render(lists_only, [*USER, *parts]) == "[Hi <b> é][a][b]"
    assigned = "{% set body = messages[0].content %}{% for part in body %}[{{ part.text }}]{% endfor %}"
    assert render(assigned, USER) == "[Hi <b> é]"
    refusal = [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]
    assert render("{{ messages[0].content }}", refusal) == "no"
    assert render("{{ messages[0].content == '' }}", [{"role": "assistant", "content": None, "name": None}]) == "True"


def test_roles_and_reasoning() -> None:
    messages = [{"role": "developer", "content": "d"}, {"role": "assistant", "content": "c", "reasoning": "r"}]
    assert render("{{ messages[0].role }} {{ messages[1].reasoning_content }}", messages) == "system r"
    assert render("{% if messages[0].role == 'developer' %}dev{% endif %}", messages) == "dev"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], r"messages\[0\]: a message is an object with a role"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content: neither"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\]: content of type 'image_url' is not supported"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text: not a string"),
        ([{"role": "assistant", "tool_calls": "x"}], r"tool_calls: not a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\]: a tool call"),
        ([{"role": "assistant", "content": "first"}], "Roles must alternate"),
        ([{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}], "Only user, system and assistant"),
    ],
)
def test_refused_messages(messages: list[Any], message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(samples.INST, messages)


def test_arguments_that_are_no_object_stay_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{broken"}}
    text = render(samples.CHATML, [*USER, {"role": "assistant", "tool_calls": [call]}], add_generation_prompt=False)
    assert '"arguments": {broken}' in text
    call["function"]["arguments"] = ""
    text = render(samples.CHATML, [*USER, {"role": "assistant", "tool_calls": [call]}], add_generation_prompt=False)
    assert '"arguments": {}}' in text


def write(folder: Path, config: dict[str, Any], **files: str) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_jinja", ".jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def test_where_templates_come_from(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate.load(write(tmp_path, {}))
    folder = write(tmp_path, {"chat_template": "config {{ eos_token }}", "eos_token": {"content": "</s>"}})
    assert ChatTemplate.load(folder).render(USER) == "config </s>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    loaded = ChatTemplate.load(write(tmp_path, {"chat_template": named}))
    assert loaded.render(USER) == "plain"
    assert loaded.render(USER, tools=[]) == "plain"
    assert loaded.render(USER, tools=samples.TOOLS) == loaded.source == "with tools"
    write(tmp_path, {"chat_template": named}, chat_template_jinja="file", additional_chat_templates__tool_use_jinja="file tools")
    assert ChatTemplate.load(tmp_path).render(USER) == "file"
    assert ChatTemplate.load(tmp_path).render(USER, tools=samples.TOOLS) == "file tools"
    assert ChatTemplate.load(tmp_path, "{{ 'given' }}").render(USER) == "given"
    assert ChatTemplate.load(tmp_path, tmp_path / "chat_template.jinja").render(USER) == "file"
    assert ChatTemplate.load(tmp_path, str(tmp_path / "chat_template.jinja")).render(USER) == "file"


def test_bad_templates_are_refused_at_loading(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"no-such\.jinja"):
        ChatTemplate.load(write(tmp_path, {}), "no-such.jinja")
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate.load(tmp_path, "x\n{% if %}")
    with pytest.raises(TemplateError, match="neither a text nor a list"):
        ChatTemplate.load(write(tmp_path, {"chat_template": [{"name": "x"}]}))
    with pytest.raises(TemplateError, match="named default: a, b"):
        ChatTemplate.load(write(tmp_path, {"chat_template": {"a": "1", "b": "2"}}))


def test_demo_models_own_template(smollm_folder: Path) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(smollm_folder)
    ours = ChatTemplate.load(smollm_folder)
    for messages in (USER, TURNS):
        assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
