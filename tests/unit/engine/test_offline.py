"""`LLM` in one process: outputs, misuse, interrupts, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ep_runtime import LLM, SamplingParams
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.text_model import write_text_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("offline")
    model, text = make_checkpoint("mixtral", "plain", root / "model"), write_text_model(root / "text")
    (model / "tokenizer.json").write_bytes((text / "tokenizer.json").read_bytes())
    return model


def make_llm(folder: Path) -> LLM:
    return LLM(str(folder), device="cpu", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, threads=1)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with make_llm(folder) as made:
        yield made


def test_a_stop_string_does_not_reach_into_the_next_call(llm: LLM) -> None:
    """The abort that a stop string causes is read by the engine in the next call."""
    whole = llm.generate([[5, 6]], GREEDY)[0].outputs[0]
    stop = whole.text[-2:]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=[stop])
    answers = [llm.generate([[5, 6]], params)[0].outputs[0] for _ in range(3)]
    assert {(a.finish_reason, a.stop_reason) for a in answers} == {("stop", stop)}
    assert {a.text for a in answers} == {whole.text[: whole.text.index(stop)]}
    assert llm.generate([[5, 6]], GREEDY)[0].outputs[0] == whole


def test_stop_strings_wait_for_min_tokens_as_in_the_server(llm: LLM) -> None:
    whole = llm.generate([[5, 6]], GREEDY)[0].outputs[0]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=[whole.text[0]], min_tokens=8)
    assert llm.generate([[5, 6]], params)[0].outputs[0].token_ids == whole.token_ids
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=[whole.text[0]])
    assert len(llm.generate([[5, 6]], params)[0].outputs[0].token_ids) < 8


def test_misuse_is_refused_by_place_or_answered_by_prompt(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    for prompts, text in (([[5], []], "prompt 1 has 0 tokens"), ([[5] * 64], "prompt 0 has 64 tokens")):
        with pytest.raises(ValueError, match=text):
            llm.generate(prompts, GREEDY)
    with pytest.raises(ValueError, match="n = 0"):
        llm.generate([[5]], SamplingParams(n=0))
    with pytest.raises(ValueError, match="2 prompts, but 1"):
        llm.generate([[5], [6]], [GREEDY])
    bad, good = llm.generate([[5, VOCAB], [5]], GREEDY)
    assert (bad.outputs[0].finish_reason, good.outputs[0].finish_reason) == ("error", "length")
    assert bad.outputs[0].error == f"prompt: token ids must be in 0..{VOCAB - 1}"
    (odd,) = llm.generate([[5]], SamplingParams(temperature=-1.0))
    assert odd.outputs[0].error == "temperature is -1.0; it must not be negative"
    assert len(llm.generate([[5]], SamplingParams(n=9, max_tokens=2, ignore_eos=True))[0].outputs) == 9


def test_an_interrupted_call_leaves_what_can_only_be_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, turns = make_llm(folder), 0
    turn = llm.head.turn

    def interrupted(idle_wait_s: float = 0.0) -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            raise KeyboardInterrupt
        turn(idle_wait_s)

    monkeypatch.setattr(llm.head, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6]], GREEDY)
    with pytest.raises(RuntimeError, match="cut short"):
        llm.generate([[5]], GREEDY)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[5]], GREEDY)


def test_loops_are_refused_by_a_model_that_has_none(llm: LLM, folder: Path) -> None:
    with pytest.raises(ValueError, match="prompt 1: max_loops is for looped models"):
        llm.generate([[5], [6]], [GREEDY, SamplingParams(max_loops=2)])
    with pytest.raises(ValueError, match="prompt 0: exit_thresholds is for looped models"):
        llm.generate([[5]], SamplingParams(exit_thresholds=[0.5]))
    assert llm.generate([[5]], GREEDY)[0].outputs[0].token_loops == []
    with pytest.raises(Exception, match="max_loops is 2; this model is not looped"):
        LLM(str(folder), device="cpu", max_loops=2, max_num_seqs=2, max_num_batched_tokens=64)


def test_longer_than_the_model_is_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(Exception, match="max_model_len is 600; this model has 512 positions"):
        LLM(str(folder), device="cpu", max_model_len=600, max_num_seqs=2, max_num_batched_tokens=64)
