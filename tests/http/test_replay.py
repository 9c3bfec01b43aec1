"""Answers across epochs: wherever engines end, and however often, a request reads as if nothing had happened.

Each kind of request is answered once without a fault; every disturbed run must give the same, streamed or not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ep_runtime.frontend.config import FrontendConfig
from ep_runtime.frontend.text.tokenizer import Tokenizer
from ep_runtime.frontend.text_stack import TextStack
from protocol.messages import EpochReady, Mask, Submit
from tests.support.fake_engine import epoch_ready
from tests.support.fake_sequences import fake_depth
from tests.support.inprocess import Cut, House, Played

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "The lazy dog. Paris is the capital."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}
FORCED = {"type": "function", "function": {"name": "get_weather"}}
SOME = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FORCED]}}
THINKING = {"chat_template_kwargs": {"thinking": True}}
LOOPS = {"max_loops": 3, "exit_thresholds": [0.5, 0.75], "return_token_ids": True}
WHOLE = {"prompt_logprobs": 2}

KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "text": (CHAT, {}, TEXT),
    "split characters": (CHAT, {}, "naïve 日本語 😀 fox"),
    "stop string": (CHAT, {"stop": ["dog. Par", "never"]}, TEXT),
    "stop string shown": (CHAT, {"stop": "dog. Par", "include_stop_str_in_output": True}, TEXT),
    "tool calls": (CHAT, {"tools": TOOLS, "parallel_tool_calls": True}, f"So: {CALL}\n{CALL}"),
    "forced tool call": (CHAT, {"tools": TOOLS, "tool_choice": FORCED}, CALL),
    "some of the tools": (CHAT, {"tools": TOOLS, "tool_choice": SOME}, f"So: {CALL}\n{CALL} 日"),
    "reasoning": (CHAT, THINKING, "one two</think>\n\nParis"),
    "schema after reasoning": (CHAT, {**THINKING, "response_format": SCHEMA}, 'one</think>{"city": "日"}'),
    "schema": (COMPLETIONS, {"response_format": SCHEMA, "n": 2, "max_tokens": 40}, '{"city": "Paris"}'),
    "chat logprobs": (CHAT, {"logprobs": True, "top_logprobs": 3, "return_token_ids": True}, "日本 fox"),
    "logprobs": (COMPLETIONS, {"logprobs": 2, "max_tokens": 40}, "日本 fox"),
    "echo": (COMPLETIONS, {"prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 40}, "quick fox"),
    "scored prompt": (COMPLETIONS, {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 0}, "x"),
    "prompt logprobs": (CHAT, WHOLE, "quick fox"),
    "samples": (CHAT, {"n": 2, "stop": "is"}, TEXT),
    "prompts": (COMPLETIONS, {"prompt": ["a", "日"], "n": 2, "max_tokens": 9, "return_token_ids": True}, TEXT),
    "stop token": (CHAT, {"stop_token_ids": [], "return_token_ids": True}, TEXT),
    "loops": (CHAT, {**LOOPS, "n": 2, "stop": "is"}, TEXT),
    "loops of prompts": (COMPLETIONS, {**LOOPS, "prompt": ["a", "日"], "max_tokens": 9}, TEXT),
    "loops under a grammar": (CHAT, {**LOOPS, "response_format": SCHEMA}, '{"city": "日"}'),
    "length": (COMPLETIONS, {"max_tokens": 7}, "日本語 fox"),
    "least length": (CHAT, {"min_tokens": 9, "max_tokens": 12, "skip_special_tokens": False}, "fox"),
}
STREAMS = [(kind, stream) for kind in KINDS for stream in (False, True) if not (stream and KINDS[kind][1] is WHOLE)]


@pytest.fixture(scope="module")
def house(model: Path, tokenizer: Tokenizer) -> Iterator[House]:
    config = FrontendConfig(
        model=str(model), runtime_dir="/nowhere", served_model_name=("tiny",), max_queue=8, reasoning_parser="qwen3"
    )
    text = TextStack.load(config)

    def ready(epoch: int) -> EpochReady:
        return epoch_ready(epoch, eos=tokenizer.eos_token_ids[0], vocab_size=tokenizer.vocab_size, max_loops=4)

    yield House(config, text, ready)
    text.close()


def place(submit: Submit) -> int:
    """The sequence's place in its request."""
    return int(submit.request_id.rpartition("-")[2])


def play(house: House, kind: str, stream: bool, cuts: list[Cut] | None = None, **options: Any) -> Played:
    """One request of this kind. Samples and prompts have outputs of their own: rotations of the kind's."""
    path, fields, output = KINDS[kind]
    tokenizer = house.text.tokenizer
    eos = tokenizer.eos_token_ids[0]
    ids = tokenizer.encode(output, False)
    body = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "The"}
    body |= {"seed": 5, **fields}
    if kind == "stop token":
        body["stop_token_ids"] = [ids[8]]
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}

    def script(submit: Submit) -> list[int]:
        turn = place(submit) % len(ids)
        return [*ids, eos] if submit.sampling.grammar or not turn else [*ids[turn:], *ids[:turn], eos]

    played = play_once(house, path, body, script, cuts, options)
    check_replays(played, script, eos, cuts or [])
    return played


def play_once(house: House, path: str, body: dict[str, Any], script: Any, cuts: list[Cut] | None, options: Any) -> Played:
    """Without the checks of `play`."""
    return house.play([(path, body)], script, cuts, eos=house.text.tokenizer.eos_token_ids[0], **options)


def check_replays(played: Played, script: Any, eos: int, cuts: list[Cut]) -> None:
    """What was submitted again: the same request, its own tokens so far, in the same order, under the right suspicion."""
    original: dict[str, Submit] = {}
    for epoch in range(1, len(cuts) + 2):
        again = played.link.submits(epoch)
        places = [place(submit) for submit in again]
        if not any(submit.sampling.grammar for submit in again):
            assert places == sorted(places)
        for submit in again:
            first = original.setdefault(submit.request_id, submit)
            assert (submit.prompt, submit.sampling, submit.group) == (first.prompt, first.sampling, first.group)
            loops = submit.sampling.loops
            assert submit.depths == ([] if loops is None else [fake_depth(at, loops) for at in range(len(submit.generated))])
            if not submit.sampling.grammar:
                whole = script(submit)
                assert submit.generated == [whole[at % len(whole)] for at in range(len(submit.generated))]
            # One that waited for its mask may have been sent after the late word of the epoch before.
            latest = epoch if submit.sampling.grammar else epoch - 1
            counts = [suspicions(played, submit.request_id, epoch, cuts, heard) for heard in (epoch - 1, latest)]
            assert counts[0] <= submit.suspicions <= counts[1]


def suspicions(played: Played, request_id: str, epoch: int, cuts: list[Cut], heard: int) -> int:
    """Suspicious ends of epochs that this sequence was sent in, the late words of those before `heard` included."""
    sent = [number for number in range(1, epoch) if any(s.request_id == request_id for s in played.link.submits(number))]
    return sum(any(cuts[number - 1].told) or (number < heard and any(cuts[number - 1].late)) for number in sent)


def masks_of(played: Played) -> dict[tuple[str, int], bytes]:
    """Every mask that was sent, by sample and generated index; one that was sent again must be the same."""
    found: dict[tuple[str, int], bytes] = {}
    for _, message in played.link.sent:
        match message:
            case Submit() if message.sampling.grammar:
                key, mask = (message.request_id.rpartition("-")[2], len(message.generated)), message.mask
            case Mask():
                key, mask = (message.request_id.rpartition("-")[2], message.index), message.mask
            case _:
                continue
        assert found.setdefault(key, mask) == mask
    return found


@pytest.fixture(scope="module")
def calm(house: House) -> dict[tuple[str, bool], Played]:
    """Every kind, answered by one engine."""
    return {(kind, stream): play(house, kind, stream) for kind, stream in STREAMS}


@pytest.mark.parametrize(("kind", "stream"), STREAMS)
def test_the_undisturbed_answer_is_worth_comparing(calm: dict[tuple[str, bool], Played], kind: str, stream: bool) -> None:
    played = calm[kind, stream]
    assert played.responses[0].status_code == 200, played.responses[0].text
    assert len(played.link.submits(1)[0].prompt) > 0
    assert played.folded[0]


@pytest.mark.parametrize(("kind", "stream"), STREAMS)
def test_an_epoch_that_ends_between_any_two_results(
    house: House, calm: dict[tuple[str, bool], Played], kind: str, stream: bool
) -> None:
    wanted, wanted_masks = calm[kind, stream].folded, masks_of(calm[kind, stream])
    results = play(house, kind, stream, chunk=7).link.engines[1].steps
    # One epoch after the other, each for a single result, until the answer is complete.
    played = play(house, kind, stream, [Cut(1, told=(False, True)) for _ in range(2 * results)], chunk=7)
    assert played.folded == wanted
    assert masks_of(played) == wanted_masks
    for point in range(results + 1):
        played = play(house, kind, stream, [Cut(point)], chunk=7)
        assert played.folded == wanted, f"cut after {point} results"
        assert masks_of(played) == wanted_masks


@pytest.mark.parametrize("kind", ["length", "stop token", "echo", "samples", "text", "schema"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_epoch_that_ends_before_it_says_that_a_sequence_is_complete(
    house: House, calm: dict[tuple[str, bool], Played], kind: str, stream: bool
) -> None:
    played = play(house, kind, stream, [Cut(60)], unseen=True)
    folded = played.folded[0]
    if kind == "stop token":
        # Its text is out before anything says that it stops; all else agrees.
        assert (folded[1] if stream else folded[1]["choices"])[0]["finish_reason"] == "stop"
        return
    assert played.folded == calm[kind, stream].folded
    assert played.link.submits(2) == []


CUTS = st.builds(
    Cut,
    steps=st.integers(0, 5),
    told=st.lists(st.booleans(), max_size=3).map(tuple),
    late=st.lists(st.booleans(), max_size=1).map(tuple),
    ready=st.sampled_from([True, True, True, False]),
)


@given(
    which=st.sampled_from(STREAMS),
    cuts=st.lists(CUTS, max_size=12),
    tokens=st.integers(1, 3),
    chunk=st.sampled_from([1, 3, 100]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_any_row_of_epochs_gives_the_same_answer(
    house: House,
    calm: dict[tuple[str, bool], Played],
    which: tuple[str, bool],
    cuts: list[Cut],
    tokens: int,
    chunk: int,
    seed: int,
) -> None:
    draw = random.Random(seed)

    def choose(names: list[str]) -> list[str]:
        return draw.sample(names, draw.randint(1, len(names)))

    # Before the first epoch there is nobody to take a request.
    cuts = [replace(cut, ready=cut.ready or not place) for place, cut in enumerate(cuts)]
    played = play(house, *which, cuts, tokens=tokens, chunk=chunk, choose=choose)
    assert played.folded == calm[which].folded
    assert masks_of(played).items() <= masks_of(calm[which]).items()


def test_requests_go_on_in_the_order_of_their_arrival(house: House) -> None:
    ids = house.text.tokenizer.encode(TEXT, False)
    bodies = [(COMPLETIONS, {"prompt": [40 + number], "max_tokens": 6, "seed": number}) for number in range(8)]
    played = house.play(
        bodies, lambda submit: [*ids], [Cut(2), Cut(0), Cut(1, ready=False), Cut(1)], eos=house.text.tokenizer.eos_token_ids[0]
    )
    assert [response.status_code for response in played.responses] == [200] * 8
    order = [submit.prompt for submit in played.link.submits(1)]
    assert sorted(order) == [[40 + number] for number in range(8)]
    for epoch in (2, 4, 5):
        assert [submit.prompt for submit in played.link.submits(epoch)] == order
