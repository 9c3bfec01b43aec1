"""Small tokenizers saved as model folders, and chat templates that use what the served models' own templates use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, world! Hello there, how are you today?",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3, "units": null}}',
    "naïve café 東京は日本の首都です。 😀👩‍👩‍👧‍👦 👍🏽 end\n\n    indented code = [1, 2, 3]",
    "true false null 0 1 2 3 4 5 6 7 8 9 system user assistant tool",
] * 4

TEXTS = [
    "Hello, world!",
    "  two spaces, a tab\tand\n\nlines  ",
    "naïve 東京 😀 👩‍👩‍👧‍👦 👍🏽 é à \u200d",
    "<|im_start|>user\nhi<|im_end|>\n",
    "ends in a space ",
    "",
    "한국어 العربية ไทย 🏳️‍🌈",
]

# Qwen3's constructs: tools, thinking, tool calls and results, namespace, reverse slices, loop.previtem, string methods.
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\nOne JSON object in <tool_call> tags for every call.\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string %}
        {%- if not message.content.startswith('<tool_response>') %}
            {%- set ns.searching = false %}{%- set ns.last_query = index %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and thought %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{- content }}{%- endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Mixtral's constructs: strict alternation with raise_exception, the tokenizer's bos and eos, trimmed content.
INST = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant, starting with user') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system is defined %}{{- ' [INST] ' + system + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] | trim + eos_token }}
    {%- else %}{{- raise_exception('Only user, system and assistant roles are supported') }}{%- endif %}
{%- endfor %}
"""

# Qwen3.5's way with content: a macro that takes strings and lists of parts; parameters written one by one.
XML_MACRO = """\
{%- macro show(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}{%- if 'text' in item %}{{- item.text }}{%- endif %}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + show(message.content) | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {%- set plain = value is not mapping and (value is string or value is not sequence) %}
            {%- set value = value | string if plain else value | tojson | safe %}
            {{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather in <a city> & more; naïve",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 7},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                    "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
                    "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time"}},
]

CALLS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Paris?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "need a tool",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Zürich <x>", "days": 2}},
            },
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
]


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE as Qwen's and Llama 3's, every byte a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    plain = ["<tool_call>", "</tool_call>", "<think>", "</think>", "é東"]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return tokenizer


def pieces_tokenizer() -> Tokenizer:
    """BPE with byte fallback and `▁` as Llama 2's and Mixtral's; its characters are few, so that many fall back to bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *fallback], show_progress=False)
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in CORPUS[:2]], trainer)
    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] not in fallback]
    settings["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Unigram with the Metaspace decoder, as T5's and other sentencepiece conversions."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    tokenizer.decoder = decoders.Metaspace("▁", "always")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any], **files: dict[str, Any]) -> Path:
    """Writes tokenizer.json, tokenizer_config.json and further JSON files by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    for stem, value in {"tokenizer_config": settings, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def gguf_tokenizer(tokens: Sequence[str], merges: Sequence[str], control: Sequence[int]) -> Tokenizer:
    """The byte-level BPE tokenizer that a GGUF file describes (pre-tokenizer "smollm": single digits, then GPT-2's)."""
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[index], special=True, normalized=False) for index in control])
    return tokenizer


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    """`text` cut at these places (any integers)."""
    places = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
