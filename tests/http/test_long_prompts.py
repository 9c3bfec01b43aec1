"""Long texts: what certainly does not fit is refused before it is tokenized, and what is tokenized leaves no memory behind."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import unicodedata
from typing import Any

import psutil
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from ep_runtime.frontend import text_jobs
from ep_runtime.frontend.text.token_bound import UNICODE_SHRINK, token_bound
from ep_runtime.frontend.text.tokenizer import Tokenizer
from ep_runtime.frontend.text_jobs import LONG, TextJobs
from tests.http.conftest import TEXT, Stack
from tests.http.test_lifecycle import Background, MakeStack

MIB = 2**20
COUNTING = """
import sys
from ep_runtime.frontend.text.tokenizer import Tokenizer
encode = Tokenizer.encode
def counted(self, text, add_special_tokens=True):
    sys.stderr.write(f"encoded {text[:40]!r}\\n")
    return encode(self, text, add_special_tokens)
Tokenizer.encode = counted
"""
"""Run before a frontend: every text that is tokenized is a line of its stderr."""

PIECES = [
    "  " * 40,
    "\n" * 9,
    "a",
    "the ",
    "<|end|>",
    "café",
    "cafe\u0301",
    "\u212b\u0301",
    "\u1fbe\u0308\u0301",
    "각",
    "각",
    "東",
    "😀",
    "\x00",
]


def encoded(stack: Stack) -> int:
    """How many texts the frontend has tokenized so far. Its stderr is read up to a last text, which does not count."""
    mark = f"mark {len(stack.server.err)}."
    assert stack.http.post("/tokenize", json={"prompt": mark}).status_code == 200
    stack.server.wait_line("err", f"encoded '{mark}'")
    return sum(line.startswith("encoded") and "'mark " not in line for line in stack.server.err)


def byte_level(**model: Any) -> tokenizers.Tokenizer:
    """Byte-level BPE, trained on words that white space and marks make long."""
    backend = tokenizers.Tokenizer(models.BPE(**model))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False)
    backend.train_from_iterator([TEXT, " " * 64, "cafe\u0301 각각 ΐΐΐ " * 9] * 3, trainer)
    return backend


def fallback(normalizer: Any) -> tokenizers.Tokenizer:
    """BPE with byte fallback, as sentencepiece conversions have it."""
    tokens = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "t", "h", "e", "th", "the", "▁▁"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [("t", "h"), ("th", "e"), ("▁", "▁")]
    model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return backend


def with_nfc() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    return backend


def settings_of(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    settings = json.loads(backend.to_str())
    assert isinstance(settings, dict)
    return settings


@pytest.mark.parametrize(
    "backend",
    [
        byte_level(),
        with_nfc(),
        fallback(None),
        fallback(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
        fallback(normalizers.Sequence([normalizers.Replace(" ", "▁"), normalizers.NFC()])),
    ],
    ids=["bytes", "nfc", "fallback", "spaces", "spaces and nfc"],
)
def test_no_text_has_fewer_tokens_than_the_bound(backend: tokenizers.Tokenizer) -> None:
    bound = token_bound(settings_of(backend), backend)
    assert bound is not None
    draw = random.Random(11)
    texts = [piece * 50 for piece in PIECES] + ["".join(draw.choices(PIECES, k=draw.randrange(1, 60))) for _ in range(300)]
    for text in texts:
        assert bound.least(text) <= len(backend.encode(text, add_special_tokens=False).ids), text
    assert bound.least("") == 0
    assert bound.least("x" * 10 * bound.longest * bound.shrink) >= 10


def swallowing() -> dict[str, tokenizers.Tokenizer]:
    """Tokenizers for which one token may stand for text of any length."""
    cases = {name: byte_level() for name in ("stripping", "removing", "compatible", "shorter", "lacking", "words")}
    cases["stripping"].add_special_tokens([AddedToken("<mask>", lstrip=True)])
    cases["removing"].pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])
    cases["compatible"].normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    cases["shorter"].normalizer = normalizers.Replace("aaaa", "a")
    cases["lacking"] = fallback(None)
    cases["lacking"].model = models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True)
    cases["words"].model = models.WordLevel({"<unk>": 0}, unk_token="<unk>")
    return cases


@pytest.mark.parametrize(("name", "backend"), swallowing().items())
def test_nothing_is_claimed_where_a_token_may_swallow_any_text(name: str, backend: tokenizers.Tokenizer) -> None:
    assert token_bound(settings_of(backend), backend) is None


def test_composing_shortens_no_text_more_than_is_assumed() -> None:
    """For each composed character: the longest text that is equal to it, from the longest spelling of each of its parts."""
    longest: dict[str, int] = {}
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    for char in characters:
        parts = unicodedata.normalize("NFD", char)
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(char.encode()))
    worst = 0.0
    for char in characters:
        parts = unicodedata.normalize("NFD", char)
        source = sum(longest[part] for part in parts)
        assert len(char.encode()) <= source
        for form in ("NFC", "NFD"):
            worst = max(worst, source / len(unicodedata.normalize(form, char).encode()))
    assert 3 < worst <= UNICODE_SHRINK


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(make_stack: MakeStack) -> None:
    stack = make_stack(before=COUNTING)
    stack.engine_of(1, max_model_len=512)
    stack.server.wait_line("out", "ready")
    assert stack.complete().status_code == 200
    before = encoded(stack)
    huge = TEXT * 2000
    longest = max(len(stack.tokenizer.token_bytes(token)) for token in range(stack.tokenizer.vocab_size))
    messages = [{"role": "user", "content": huge}]
    refusals = [
        stack.complete(prompt=huge, max_tokens=7),
        stack.complete(prompt=["Hi", huge], max_tokens=7),
        stack.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 7}),
    ]
    for refused in refusals:
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        start, _, rest = error["message"].partition("at least ")
        assert start == "This model's maximum context length is 512 tokens; the request has "
        least, _, rest = rest.partition(" ")
        assert rest == "prompt tokens and 7 tokens to generate."
        assert len(huge) // longest <= int(least) <= len(stack.tokenizer.encode(huge)) + 100
    # The short prompt beside the long one is all that was tokenized.
    assert encoded(stack) == before + 1
    # What might fit is counted, and the number is exact.
    prompt = "x" * 513
    refused = stack.complete(prompt=prompt)
    assert f"has {len(stack.tokenizer.encode(prompt))} prompt tokens" in refused.json()["error"]["message"]
    assert stack.http.post("/tokenize", json={"prompt": huge}).json()["count"] == len(stack.tokenizer.encode(huge))


def test_a_long_prompt_leaves_no_memory_behind(make_stack: MakeStack) -> None:
    stack = make_stack(before=COUNTING)
    stack.engine_of(1, max_model_len=60_000)
    stack.server.wait_line("out", "ready")
    assert stack.complete().status_code == 200
    process = psutil.Process(stack.server.process.pid)
    before = process.memory_info().rss
    several = [Background(stack.complete, prompt="a " * (MIB // 8) + str(number)) for number in range(3)]
    assert [request.result().status_code for request in several] == [400] * 3
    assert encoded(stack) == 4
    # Each takes 80 MiB while it is tokenized, and glibc would keep most of it for each thread.
    assert process.memory_info().rss - before < 25 * MIB


def test_long_texts_go_one_at_a_time_and_short_ones_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[str] = []
    monkeypatch.setattr(text_jobs, "give_memory_back", lambda: given_back.append(threading.current_thread().name))
    release, running, most = threading.Event(), [0], [0]

    def long_work() -> str:
        running[0] += 1
        most[0] = max(most[0], running[0])
        assert release.wait(30)
        running[0] -= 1
        return threading.current_thread().name

    async def scenario() -> None:
        jobs = TextJobs()
        waiting = [asyncio.create_task(jobs.run(long_work, LONG)) for _ in range(4)]
        assert [await jobs.run(lambda: 1, LONG - 1) for _ in range(3)] == [1, 1, 1]
        assert given_back == []
        release.set()
        names = await asyncio.gather(*waiting)
        jobs.close()
        assert most[0] == 1
        assert given_back == names

    asyncio.run(scenario())


def test_a_loaded_tokenizer_counts_its_longest_special_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.least_tokens("x" * 1300) == 1300 // len("<|endoftext|>")
