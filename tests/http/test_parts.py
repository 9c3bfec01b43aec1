"""The frontend's pure parts: journal, readiness, seeds, the cutting of one choice's output."""

from __future__ import annotations

import hashlib
import json

import msgspec
import pytest

from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.api.logprobs import CompletionLogprobs, TokenTexts, chat_entry
from ep_runtime.frontend.choice import Choice, ChoiceParts
from ep_runtime.frontend.config import FrontendConfig
from ep_runtime.frontend.journal import Journal, ended_unseen
from ep_runtime.frontend.readiness import EngineHealth, Phase, unready_reason
from ep_runtime.frontend.reasoning_gate import AfterReasoning, free_mask
from ep_runtime.frontend.replay import ReplayClock
from ep_runtime.frontend.sampling import derive_seed, token_budget
from ep_runtime.frontend.text.detokenizer import IncrementalDetokenizer
from ep_runtime.frontend.text.reasoning import reasoning_splitter
from ep_runtime.frontend.text.stops import StopMatcher
from ep_runtime.frontend.text.tokenizer import Tokenizer
from protocol.messages import SamplingParams, SequenceUpdate, Submit, TokenLogprobs


class Collector:
    def __init__(self) -> None:
        self.updates: list[SequenceUpdate] = []

    def deliver(self, update: SequenceUpdate) -> None:
        self.updates.append(update)

    def fail(self, error: ApiError) -> None:
        raise AssertionError(error)


def submit(name: str, **sampling: object) -> Submit:
    return Submit(name, "group", [1, 2], SamplingParams(seed=1, **{"max_tokens": 4, **sampling}))


def test_journal_ends_every_entry_once() -> None:
    journal, sink = Journal(), Collector()
    for name in ("c", "a", "b"):
        journal.add(submit(name), sink)
    with pytest.raises(ValueError, match="in use"):
        journal.add(submit("a"), sink)
    assert [entry.submit.request_id for entry in journal.unfinished()] == ["c", "a", "b"]
    assert journal.record(SequenceUpdate("a", [7, 8])) is not None
    assert journal.get("a").replay().generated == [7, 8]
    journal.check_integrity()
    assert journal.record(SequenceUpdate("a", [9], finish="stop")) is not None
    assert journal.record(SequenceUpdate("a", [9], finish="stop")) is None
    assert [entry.submit.request_id for entry in journal.withdraw(["b", "a", "b"])] == ["b"]
    journal.check_integrity()
    assert len(journal) == 1
    journal.record(SequenceUpdate("c", [1] * 5))
    with pytest.raises(AssertionError, match="more tokens"):
        journal.check_integrity()


@pytest.mark.parametrize(
    ("tokens", "sampling", "finish"),
    [
        ([], {}, None),
        ([5, 6], {}, None),
        ([5, 6, 7, 8], {}, "length"),
        ([5, 99], {}, "stop"),
        ([5, 99], {"ignore_eos": True}, None),
        ([5, 6], {"stop_token_ids": [6], "ignore_eos": True}, "stop"),
        ([99], {"min_tokens": 1}, "stop"),
        ([99], {"min_tokens": 2}, None),
    ],
)
def test_a_sequence_that_was_complete_is_not_replayed(tokens: list[int], sampling: dict, finish: str | None) -> None:
    journal = Journal()
    entry = journal.add(submit("a", **sampling), Collector())
    journal.record(SequenceUpdate("a", tokens))
    ended = ended_unseen(entry, [99])
    assert (None if ended is None else ended.finish) == finish


def test_an_entry_is_suspected_once_an_epoch_that_it_was_in() -> None:
    entry = Journal().add(submit("a"), Collector())
    entry.suspect(1)
    assert entry.replay().suspicions == 0
    entry.epochs += [1, 2, 3]
    for epoch in (1, 1, 3, 4):
        entry.suspect(epoch)
    assert entry.replay().suspicions == 2


def test_a_mask_that_is_not_known_yet_holds_the_replay_back() -> None:
    entry = Journal().add(submit("a", grammar=True), Collector())
    assert not entry.mask_due
    entry.tokens.append(3)
    assert entry.mask_due
    entry.mask, entry.mask_index = b"\x01\x00\x00\x00", 1
    assert not entry.mask_due
    assert entry.replay().mask == b"\x01\x00\x00\x00"


def test_readiness_follows_the_slowest_rank() -> None:
    health = EngineHealth.running(2, 0.0)
    assert unready_reason(health, False, 10.0, 10.0) is None
    assert "no rank has moved past step -1" in (unready_reason(health, False, 10.5, 10.0) or "")
    health.observe([5, 5], 1.0)
    assert unready_reason(health, False, 11.0, 10.0) is None
    for now in range(2, 20):
        health.observe([5 + now, 5], float(now))
    assert "rank 1 has not moved past step 5 for 18.0 s" in (unready_reason(health, False, 19.0, 10.0) or "")
    # A rank behind the head is well while it moves; reports in which none moves refresh nobody.
    for now in range(20, 40):
        health.observe([100, now], float(now))
    assert unready_reason(health, False, 30.0, 10.0) is None
    for now in range(40, 60):
        health.observe([100, 39], float(now))
    assert "rank 0 has not moved past step 100" in (unready_reason(health, False, 40.0, 10.0) or "")
    assert "no rank has moved" in (unready_reason(health, False, 60.0, 10.0) or "")
    health.observe([101], 60.0)
    assert "rank 1 has not moved past step 39" in (unready_reason(health, False, 60.0, 10.0) or "")
    assert (unready_reason(health, True, 39.0, 10.0) or "").startswith("draining")


def test_a_step_of_a_minute_is_no_reason() -> None:
    health = EngineHealth.running(4, 0.0)
    health.observe([7] * 4, 10.0)
    bound = FrontendConfig(model="m", served_model_name=("m",), runtime_dir="/x").ready_bound_seconds
    assert all(unready_reason(health, False, 10.0 + seconds, bound) is None for seconds in range(61))


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RECOVERING, Phase.FAILED])
def test_without_an_epoch_the_reason_is_told(phase: Phase) -> None:
    assert unready_reason(EngineHealth(phase, "it loads"), False, 0.0, 1.0) == f"{phase.value}: it loads"


def test_a_replay_lasts_until_the_last_sequence_goes_on() -> None:
    now, took = [10.0], []
    clock = ReplayClock(lambda: now[0], took.append)
    clock.begin(["a", "b"])
    clock.settle("c")
    now[0] = 11.0
    clock.settle("a")
    clock.settle("a")
    now[0] = 12.5
    clock.settle("b")
    assert took == [2.5]
    clock.settle("b")
    clock.begin([])
    assert took == [2.5, 0.0]
    clock.begin(["a"])
    clock.cancel()
    clock.settle("a")
    clock.begin(["b"])
    clock.settle("b")
    assert took == [2.5, 0.0, 0.0]


def test_prompt_logprobs_count_and_are_told_once(tokenizer: Tokenizer) -> None:
    choice = Choice(0, ChoiceParts(detokenizer=IncrementalDetokenizer(tokenizer), stops=StopMatcher([])))
    first, second = TokenLogprobs(-1.0, 1, [], []), TokenLogprobs(-2.0, 1, [], [])
    one = choice.push(SequenceUpdate("a", [], prompt_start=1, prompt_logprobs=[first])).prompt_bytes
    assert one > 0
    assert choice.push(SequenceUpdate("a", [], prompt_start=1, prompt_logprobs=[second])).prompt_bytes == 0
    assert choice.push(SequenceUpdate("a", [5], prompt_start=1, prompt_logprobs=[second, second])).prompt_bytes == one
    assert choice.prompt_logprobs == {1: first, 2: second}


def test_seeds_follow_the_documented_hash() -> None:
    digest = hashlib.blake2b(bytes([7] + [0] * 7 + [2, 0, 0, 0]), digest_size=8, person=b"ep-sample").digest()
    assert derive_seed(7, 2) == int.from_bytes(digest, "little") // 2
    seeds = [derive_seed(seed, sample) for seed in (-1, 0, 1, 2**63 - 1) for sample in range(50)]
    assert len(set(seeds)) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("prompt", "asked", "default", "budget"), [(10, None, None, 90), (10, None, 16, 16), (95, None, 16, 5), (10, 90, 16, 90)]
)
def test_token_budget(prompt: int, asked: int | None, default: int | None, budget: int) -> None:
    assert token_budget(prompt, asked, 100, default) == budget


@pytest.mark.parametrize(("prompt", "asked"), [(100, None), (10, 91), (200, 1)])
def test_token_budget_refuses(prompt: int, asked: int | None) -> None:
    with pytest.raises(ApiError) as caught:
        token_budget(prompt, asked, 100)
    assert caught.value.code == "context_length_exceeded"


def test_an_update_of_several_tokens_is_cut_at_the_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick brown fox jumps", False)
    choice = Choice(0, ChoiceParts(detokenizer=IncrementalDetokenizer(tokenizer), stops=StopMatcher(["brown"])))
    entries = [TokenLogprobs(-1.0, 1, [], []) for _ in ids]
    delta = choice.push(SequenceUpdate("a", ids, entries))
    assert delta.content == "The quick "
    assert delta.finish == choice.finish == "stop"
    assert len(delta.token_ids) == len(delta.logprobs) == choice.generated < len(ids)
    assert tokenizer.decode(delta.token_ids) == "The quick brown"


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox fox fox", False)
    parts = ChoiceParts(detokenizer=IncrementalDetokenizer(tokenizer), stops=StopMatcher(["fox"]), min_tokens=len(ids))
    choice = Choice(0, parts)
    assert choice.push(SequenceUpdate("a", ids)).content.startswith("fox")


def test_logprobs_of_half_characters(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("日", False)[0]
    texts = TokenTexts(tokenizer)
    assert texts.string(half).startswith("bytes:\\x")
    entry = json.loads(msgspec.json.encode(chat_entry(texts, half, TokenLogprobs(float("-inf"), 1, [half], [-0.5]), 1)))
    assert entry["logprob"] == -9999.0
    assert bytes(entry["bytes"]) == tokenizer.token_bytes(half)
    table = CompletionLogprobs(texts, 1)
    table.add(half, TokenLogprobs(-3.0, 9, [40], [-0.1]))
    assert len(table.take()["top_logprobs"][0]) == 2


class OneToken:
    """A grammar that allows token 5 alone."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def mask(self) -> bytes:
        return (1 << 5).to_bytes(4, "little")

    def accept(self, token_id: int) -> bool:
        self.accepted.append(token_id)
        return token_id == 5


def test_a_grammar_waits_for_the_end_of_the_reasoning(tokenizer: Tokenizer) -> None:
    grammar = OneToken()
    gate = AfterReasoning(grammar, reasoning_splitter("qwen3", "<think>\n"), IncrementalDetokenizer(tokenizer), tokenizer)
    eos = tokenizer.eos_token_ids[0]
    for token in tokenizer.encode("one two</think>", False):
        bits = int.from_bytes(gate.mask(), "little")
        assert bits >> token & 1
        assert not bits >> eos & 1
        assert gate.accept(token)
    assert gate.mask() == grammar.mask()
    assert not gate.accept(6)
    assert grammar.accepted == [6]
    assert free_mask(33, (32,)) == b"\xff\xff\xff\xff\x00\x00\x00\x00"


def test_a_socket_path_must_fit() -> None:
    with pytest.raises(ValueError, match="too long"):
        FrontendConfig(model="m", served_model_name=("m",), runtime_dir="/" + "x" * 100)
