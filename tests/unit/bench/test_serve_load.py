"""The load of `bench serve` and its figures: against numpy, against the Poisson process's own moments, and by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from ep_runtime.bench.serve_client import Heard, completion, lines_of, quantile, read_record
from ep_runtime.bench.serve_load import LoadShape, arrival_times, plan_load, share_out
from ep_runtime.bench.serve_metrics import (
    RequestRecord,
    count_good,
    most_at_once,
    parse_objectives,
    result_text,
    spread,
    summarise,
)

SHAPE = LoadShape(num_prompts=50, request_rate=4.0, input_len=20, output_len=8, range_ratio=0.25, vocab_size=77, seed=3)


def record(index: int, sent: float, stamps: Sequence[float], tokens: int, error: str = "") -> RequestRecord:
    return RequestRecord(
        index=index, due=sent, sent=sent, stamps=list(stamps), prompt_tokens=10, completion_tokens=tokens, error=error
    )


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_arrivals_are_a_seeded_poisson_process(rate: float) -> None:
    count = 20_000
    times = arrival_times(count, rate, seed=5)
    assert times == arrival_times(count, rate, seed=5)
    assert times != arrival_times(count, rate, seed=6)
    gaps = np.diff(times) * rate
    assert times[0] == 0.0
    assert (gaps > 0).all()
    # Exponential gaps of mean 1: deviation 1, median ln 2, and no memory of the gap before. Four standard errors.
    error = 4 / math.sqrt(count)
    assert gaps.mean() == pytest.approx(1.0, abs=error)
    assert gaps.std() == pytest.approx(1.0, abs=2 * error)
    assert (gaps > math.log(2)).mean() == pytest.approx(0.5, abs=error)
    assert np.corrcoef(gaps[1:], gaps[:-1])[0, 1] == pytest.approx(0.0, abs=error)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrival_times(3, math.inf, seed=0) == [0.0, 0.0, 0.0]
    assert arrival_times(0, 1.0, seed=0) == arrival_times(0, math.inf, seed=0) == []


def test_a_load_follows_from_its_seed_and_keeps_its_bounds() -> None:
    load = plan_load(SHAPE)
    assert load == plan_load(SHAPE)
    assert {len(one.prompt) for one in load} <= set(range(15, 26))
    assert len({len(one.prompt) for one in load}) > 5
    assert {one.output_len for one in load} <= set(range(6, 11))
    assert all(0 <= token < 77 for one in load for token in one.prompt)
    exact = plan_load(
        LoadShape(num_prompts=5, request_rate=math.inf, input_len=7, output_len=2, range_ratio=0, vocab_size=9, seed=3)
    )
    assert [(one.at, len(one.prompt), one.output_len) for one in exact] == [(0.0, 7, 2)] * 5


def test_another_rate_changes_times_alone() -> None:
    slower = plan_load(LoadShape(**{name: getattr(SHAPE, name) for name in SHAPE.__slots__} | {"request_rate": 1.0}))
    assert [one.prompt for one in slower] == [one.prompt for one in plan_load(SHAPE)]
    assert [one.at for one in slower] == pytest.approx([4 * one.at for one in plan_load(SHAPE)])


def test_clients_share_requests_and_concurrency() -> None:
    shares = share_out(plan_load(SHAPE), 7, 3)
    assert sorted(index for indices, _ in shares for index in indices) == list(range(50))
    assert [part for _, part in shares] == [3, 2, 2]
    assert share_out(plan_load(SHAPE), None, 1) == [(list(range(50)), None)]


def test_figures_are_numpys() -> None:
    random = np.random.default_rng(1)
    records, stamps = [], []
    for index in range(57):
        at = float(random.uniform(0, 3))
        stamps.append(at + np.cumsum(random.exponential(0.02, random.integers(1, 30))))
        records.append(record(index, at, stamps[-1].tolist(), tokens=len(stamps[-1]) + index % 2))
    result = summarise([*records, record(57, 0.0, [], 0, error="status 500")], began=-1.0, objectives={})
    sent = np.array([one.sent for one in records])
    first, last = np.array([one[0] for one in stamps]), np.array([one[-1] for one in stamps])
    tokens = np.array([one.completion_tokens for one in records])
    several = tokens > 1
    expected = {
        "ttft": first - sent,
        "e2el": last - sent,
        "tpot": (last - first)[several] / (tokens[several] - 1),
        "itl": np.concatenate([np.diff(one) for one in stamps]),
    }
    for name, values in expected.items():
        for kind, value in {
            "mean": np.mean(values),
            "median": np.median(values),
            "std": np.std(values),
            "p90": np.percentile(values, 90),
            "p99": np.percentile(values, 99),
        }.items():
            assert result[f"{kind}_{name}_ms"] == pytest.approx(1e3 * value), (kind, name)
    duration = last.max() + 1.0
    assert result["duration"] == pytest.approx(duration)
    assert (result["completed"], result["failed"]) == (57, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (570, tokens.sum())
    assert result["output_throughput"] == pytest.approx(tokens.sum() / duration)
    assert result["total_token_throughput"] == pytest.approx((tokens.sum() + 570) / duration)
    assert result["request_throughput"] == pytest.approx(57 / duration)
    assert result["request_goodput"] is None
    moments = np.sort(np.concatenate([sent, last]))
    assert result["max_concurrent_requests"] == max(int(((sent <= at) & (last > at)).sum()) for at in moments)
    assert result["concurrency"] == pytest.approx((last - sent).sum() / duration)


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    records = [
        record(0, 0.0, [0.1, 0.2, 0.3], tokens=3),  # ttft 100 ms, tpot 100 ms, e2el 300 ms
        record(1, 0.0, [0.25, 0.26, 0.27], tokens=3),  # ttft 250 ms, tpot 10 ms
        record(2, 1.0, [1.125], tokens=1),  # ttft 125 ms, and no tpot
        record(3, 1.0, [1.5, 2.0], tokens=2),  # ttft 500 ms, tpot 500 ms
    ]
    assert count_good(records, {"ttft": 200.0}) == 2
    assert count_good(records, {"ttft": 125.0}) == 2
    assert count_good(records, {"ttft": 124.9}) == 1
    assert count_good(records, {"tpot": 50.0}) == 2
    assert count_good(records, {"ttft": 200.0, "tpot": 50.0}) == 1
    assert count_good(records, {"ttft": 600.0, "tpot": 600.0, "e2el": 290.0}) == 2
    result = summarise(records, began=0.0, objectives={"ttft": 200.0})
    assert result["request_goodput"] == pytest.approx(2 / 2.0)


def test_objectives_are_read_by_name() -> None:
    assert parse_objectives(["ttft:200", "tpot:50.5"]) == {"ttft": 200.0, "tpot": 50.5}
    for wrong in ("itl:3", "ttft=3", "ttft:-1", "ttft:x"):
        with pytest.raises(ValueError):
            parse_objectives([wrong])


def test_nothing_has_no_percentiles_and_nobody_no_result() -> None:
    assert set(spread([]).values()) == {None}
    with pytest.raises(RuntimeError, match="refused"):
        summarise([record(0, 0.0, [], 0, error="refused")], began=0.0, objectives={})


def test_the_printed_block_has_the_known_lines() -> None:
    result = summarise([record(0, 0.0, [0.1, 0.2], tokens=2)], began=0.0, objectives={"ttft": 200.0})
    text = result_text(result | {"request_rate": "inf", "max_concurrency": None})
    lines = text.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert "Successful requests:                     1" in lines
    assert "Request goodput (req/s):                 5.00" in lines
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "P99 TTFT (ms):                           100.00" in lines
    assert "Maximum request concurrency" not in text
    assert {len(line) for line in lines if line[0] in "=-"} == {50}


def test_a_stream_is_read_whatever_its_pieces_are() -> None:
    chunk = b'data: {"choices": [{"index": 0, "text": " a"}], "usage": null}\n\n'
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}\n\n'
    whole = [(1.0, chunk), (2.0, chunk + chunk), (3.0, usage + b"data: [DONE]\n\n")]
    found = read_record(Heard(index=7, due=0.5, sent=0.75, status=200, pieces=whole))
    assert (found.index, found.stamps, found.prompt_tokens, found.completion_tokens) == (7, [1.0, 2.0, 2.0], 4, 3)
    assert (found.error, found.ttft, found.e2el, found.tpot) == ("", 0.25, 1.25, 0.5)
    split = [(1.0, chunk[:20]), (1.5, chunk[20:]), (2.0, usage), (2.5, b"data: [DO"), (2.75, b"NE]")]
    found = read_record(Heard(index=0, due=0.0, sent=0.5, status=200, pieces=split))
    assert (found.stamps, found.error) == ([1.5], "")
    assert lines_of([]) == []


@pytest.mark.parametrize(
    ("heard", "said"),
    [
        ({"status": 429, "pieces": [(1.0, b'{"error": "queue full"}')]}, "status 429.*queue full"),
        ({"status": 200, "pieces": [(1.0, b'data: {"choices": [{"text": "a"}]}\n\n')]}, "ended early: 1 chunks"),
        ({"status": 200, "pieces": [(1.0, b'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n')]}, "in the stream.*gone"),
        ({"error": "ConnectError: refused"}, "refused"),
    ],
)
def test_what_goes_wrong_is_an_error_of_the_request(heard: dict, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        summarise([read_record(Heard(index=0, due=0.0, **heard))], began=0.0, objectives={})


def test_requests_that_end_as_others_start_are_not_together() -> None:
    assert most_at_once([record(0, 0.0, [1.0], 1), record(1, 1.0, [2.0], 1)]) == 1
    assert most_at_once([record(0, 0.0, [1.1], 1), record(1, 1.0, [2.0], 1)]) == 2


def test_small_parts() -> None:
    assert '"stream_options": {"include_usage": true}' in completion("m", [1], 2)
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert quantile([], 0.5) == 0.0
