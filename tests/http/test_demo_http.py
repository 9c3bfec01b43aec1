"""The HTTP surface over a real engine: two ranks, the demo model, the official client and curl."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import httpx
import jsonschema
import openai
import psutil
import pytest

from tests.support.demo_server import END_SECONDS, DemoServer

LIMIT = 512
QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = "The capital of France is Paris."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "inhabitants": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
JSON_STARTS = ("{", "{}", "{\\", "{'", '{}".', '{"', "{{", "{}'.")
"""The tokens of the demo's vocabulary that begin an object."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    flags = [f"--max-model-len={LIMIT}", "--num-blocks=256", "--max-num-seqs=8", "--drain-timeout=18", "--tool-call-parser=hermes"]
    server = DemoServer(tmp_path_factory.mktemp("demo"), 2, *flags)
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(server: DemoServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: DemoServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
        yield http


def chat(client: openai.OpenAI, question: str = QUESTION, **fields: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 24, **fields}
    return client.chat.completions.create(model="demo", messages=[{"role": "user", "content": question}], **options)


def read(answer: Any, stream: bool) -> tuple[str, list[list[str]], str]:
    """Content, calls as name and arguments, and finish_reason of an answer or a stream."""
    content, calls, finish = "", [], ""
    for choice in (chunk.choices[0] for chunk in answer) if stream else answer.choices:
        part = choice.delta if stream else choice.message
        content += part.content or ""
        for call in part.tool_calls or []:
            calls += [[call.function.name, ""]] if call.function.name else []
            calls[-1][1] += call.function.arguments or ""
        finish = choice.finish_reason or finish
    return content, calls, finish


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name)


def poll(wanted: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Ask until it is so: what is waited for happens in other processes and is seen over HTTP alone."""
    deadline = time.monotonic() + seconds
    while not wanted():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def all_free(http: httpx.Client) -> bool:
    free = metric(http, "ep_free_slots") == metric(http, "ep_total_slots") == 8
    return free and metric(http, "ep_free_blocks") == metric(http, "ep_total_blocks") and metric(http, "ep_journal_sequences") == 0


def test_a_streamed_chat_with_usage(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == ANSWER
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["stop"]
    used = chunks[-1].usage
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens
    whole = chat(client)
    assert whole.choices[0].message.content == ANSWER
    assert whole.usage.model_dump() == used.model_dump()


def test_curl_is_answered(server: DemoServer) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    command = ["curl", "-sS", f"{server.url}/v1/chat/completions", "-H", "content-type: application/json", "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_seeded_samples_come_again(client: openai.OpenAI) -> None:
    first, again = (chat(client, "Tell a story.", n=2, seed=7, temperature=1.0, max_tokens=10) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert texts[0] != texts[1]
    alone = chat(client, "Tell a story.", seed=7, temperature=1.0, max_tokens=10)
    assert alone.choices[0].message.content == texts[0]


def test_logprobs_are_those_of_the_greedy_choice(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=5)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(ANSWER)
    for entry in entries:
        values = [other.logprob for other in entry.top_logprobs]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, values[0])
        assert values[0] < 0


@pytest.mark.parametrize("n", [1, 2])
def test_a_schema_holds_the_output(client: openai.OpenAI, n: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    answer = chat(client, "Describe Paris as JSON.", response_format=form, n=n, temperature=1.0, seed=3, max_tokens=60)
    assert len(answer.choices) == n
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_stop_strings_cut_the_text(client: openai.OpenAI) -> None:
    answer = chat(client, stop=["ance is"])
    assert answer.choices[0].message.content == ANSWER[: ANSWER.index("ance is")]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == "ance is"


def forbid(http: httpx.Client, *texts: str) -> dict[str, float]:
    """A logit_bias against these tokens."""
    found = [http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"] for text in texts]
    assert all(len(ids) == 1 for ids in found)
    return {str(ids[0]): -100 for ids in found}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_a_schema_give_a_call_or_json(client: openai.OpenAI, http: httpx.Client, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    fields = {"tools": TOOLS, "response_format": form, "max_tokens": 60, "temperature": 1.0, "seed": 5, "stream": stream}
    content, calls, finish = read(chat(client, **fields, logit_bias=forbid(http, "<", "</", "<<")), stream)
    assert (calls, finish) == ([], "stop")
    jsonschema.validate(json.loads(content), SCHEMA)
    content, calls, finish = read(chat(client, **fields, logit_bias=forbid(http, *JSON_STARTS)), stream)
    assert (content, finish) == ("", "tool_calls")
    assert calls
    for name, arguments in calls:
        assert name == "weather"
        jsonschema.validate(json.loads(arguments), WEATHER)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tokens", "named"), [(4, False), (16, True)])
def test_a_forced_call_that_is_cut_leaks_no_markup(client: openai.OpenAI, stream: bool, tokens: int, named: bool) -> None:
    content, calls, finish = read(chat(client, tools=TOOLS, tool_choice="required", max_tokens=tokens, stream=stream), stream)
    assert (content, finish) == ("", "length")
    assert [name for name, _ in calls] == ["weather"] * named


@pytest.mark.parametrize("tokens", [LIMIT, LIMIT + 88])
def test_a_prompt_without_room_is_400_with_both_numbers(client: openai.OpenAI, tokens: int) -> None:
    with pytest.raises(openai.BadRequestError, match=rf"{LIMIT} tokens.* {tokens} prompt tokens") as refused:
        client.completions.create(model="demo", prompt=[100] * tokens)
    assert refused.value.code == "context_length_exceeded"


def test_the_longest_prompt_fits(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=[100] * (LIMIT - 1))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == LIMIT


def test_requests_together_say_what_each_says_alone(client: openai.OpenAI) -> None:
    questions = [QUESTION, "What is the capital of Italy?", "Name a yellow fruit."]
    alone = [chat(client, question, max_tokens=12).choices[0].message.content for question in questions]
    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(lambda question: chat(client, question, max_tokens=12).choices[0].message.content, questions))
    assert together == alone


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(server: DemoServer, http: httpx.Client, stream: bool) -> None:
    poll(lambda: all_free(http), "all slots free before")
    body = {"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True, "stream": stream}
    leaving = HTTPConnection("127.0.0.1", server.port, timeout=60)
    leaving.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    poll(lambda: metric(http, "ep_running_sequences") == 1, "the request runs")
    answer = leaving.getresponse() if stream else None
    if answer is not None:
        assert answer.readline().startswith(b"data: ")
        answer.close()
    leaving.close()
    poll(lambda: all_free(http), "its slot and blocks are free")
    assert metric(http, 'ep_sequences_total{finish="abort"}') >= 1


def test_the_models_own_sampling_is_taken_and_shown(server: DemoServer) -> None:
    assert "sampling defaults of the model: temperature 0.2, top_p 0.9 (generation_config auto)" in server.log()


def test_ready_follows_the_engine_without_any_request(server: DemoServer, http: httpx.Client) -> None:
    before = http.get("/ready").json()
    assert (before["status"], http.get("/health").json()["epoch"]) == ("ready", before["epoch"])
    server.engine(0).kill()
    told: list[dict[str, Any]] = []

    def again() -> bool:
        assert http.get("/health").status_code == 200
        told.append(http.get("/ready").json())
        return told[-1]["status"] == "ready" and told[-1]["epoch"] > before["epoch"]

    poll(again, "ready again, in another epoch")
    between = [body for body in told if body["status"] != "ready"]
    assert between
    assert all(body["epoch"] is None and body["reason"].startswith("recovering: ") for body in between)
    # The head says that the epoch runs, the coordinator what it took: the two come on ways of their own.
    poll(lambda: metric(http, "ep_recoveries_total") == 1, "the recovery is counted")
    assert metric(http, 'ep_last_recovery_seconds{phase="total"}') > 0


def test_sigterm_drains_and_ends_everything(server: DemoServer, client: openai.OpenAI, http: httpx.Client) -> None:
    """The last of this file: it ends the server."""
    stream = client.completions.create(
        model="demo", prompt="Once upon a time", max_tokens=48, stream=True, extra_body={"ignore_eos": True}
    )
    received = iter(stream)
    next(received)
    for rank in server.ranks():
        rank.send_signal(signal.SIGTERM)
    poll(lambda: http.get("/ready").status_code == 503, "draining")
    refused = http.post("/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert int(refused.headers["retry-after"]) >= 1
    assert [chunk.choices[0].finish_reason for chunk in received][-1] == "length"
    assert server.torchrun.wait(END_SECONDS) == 0
    _, alive = psutil.wait_procs(server.processes, timeout=END_SECONDS)
    assert alive == []
