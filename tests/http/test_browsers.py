"""What pages in a browser need: CORS headers on every answer, and HEAD."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from ep_runtime.frontend.api.errors import install_error_handlers
from ep_runtime.frontend.app import open_to
from tests.http.conftest import Stack
from tests.http.test_chat import USER
from tests.http.test_errors import check_error
from tests.http.test_lifecycle import MakeStack

PAGE = "https://app.example"
OTHER = "https://evil.example"
KEY = {"Authorization": "Bearer first-key"}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-lang"}
LEAVE = "access-control-allow-origin"
PATHS = ("/v1/models", "/v1/models/tiny", "/version", "/health", "/ping", "/ready", "/metrics", "/openapi.json")


@pytest.fixture(scope="module")
def opened(model: Any, tokenizer: Any) -> Iterator[Stack]:
    """A server that one page may call, with a key."""
    stack = Stack(model, tokenizer, api_keys=["first-key"], cors_origins=[PAGE, "http://localhost:3000"])
    stack.engine_of(1)
    stack.server.wait_line("out", "ready")
    yield stack
    stack.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_a_preflight_needs_no_key(opened: Stack, path: str, method: str) -> None:
    answer = opened.http.options(path, headers={**PREFLIGHT, "Origin": PAGE, "Access-Control-Request-Method": method})
    assert answer.status_code == 200
    assert answer.headers[LEAVE] == PAGE
    assert method in answer.headers["access-control-allow-methods"].split(", ")
    assert answer.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "Origin" in answer.headers["vary"]


def test_a_preflight_of_another_page_or_method_is_refused(opened: Stack) -> None:
    other = opened.http.options("/v1/chat/completions", headers={**PREFLIGHT, "Origin": OTHER})
    assert (other.status_code, LEAVE in other.headers) == (400, False)
    method = {**PREFLIGHT, "Origin": PAGE, "Access-Control-Request-Method": "DELETE"}
    assert opened.http.options("/v1/chat/completions", headers=method).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_answers_may_be_read(opened: Stack, stream: bool) -> None:
    body = {"messages": USER, "stream": stream}
    answer = opened.http.post("/v1/chat/completions", json=body, headers={**KEY, "Origin": PAGE})
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n") is stream
    assert answer.headers[LEAVE] == PAGE
    assert "Origin" in answer.headers["vary"]
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert "X-Request-Id" in exposed
    assert answer.headers["x-request-id"].startswith("chatcmpl-")
    other = opened.http.post("/v1/chat/completions", json=body, headers={**KEY, "Origin": OTHER})
    assert (other.status_code, LEAVE in other.headers) == (200, False)
    assert LEAVE not in opened.http.post("/v1/chat/completions", json=body, headers=KEY).headers


def test_the_official_client_from_a_page(opened: Stack) -> None:
    client = opened.client(api_key="first-key", default_headers={"Origin": PAGE})
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=USER, stream=True)
    assert raw.headers[LEAVE] == PAGE
    assert "".join(chunk.choices[0].delta.content or "" for chunk in raw.parse()) == opened.output
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="other", messages=USER)
    assert refused.value.response.headers[LEAVE] == PAGE


def test_errors_may_be_read(opened: Stack) -> None:
    page = {"Origin": PAGE}
    answers = {
        401: opened.http.post("/v1/chat/completions", json={"messages": USER}, headers=page),
        400: opened.http.post("/v1/chat/completions", json={"messages": []}, headers=page | KEY),
        404: opened.http.get("/nowhere", headers=page | KEY),
        405: opened.http.get("/v1/chat/completions", headers=page | KEY),
        413: opened.http.post("/v1/completions", content=b"x" * (17 * 2**20), headers=page | KEY),
        415: opened.http.post("/v1/completions", content=b"{}", headers=page | KEY),
    }
    for status, answer in answers.items():
        check_error(answer, status)
        assert answer.headers[LEAVE] == PAGE, status


def test_a_server_that_is_not_ready_may_be_read(make_stack: MakeStack) -> None:
    stack = make_stack(cors_origins=["*"])
    answer = stack.http.post("/v1/chat/completions", json={"messages": USER}, headers={"Origin": OTHER})
    check_error(answer, 503)
    assert answer.headers[LEAVE] == "*"
    assert "Retry-After" in answer.headers["access-control-expose-headers"]
    assert "retry-after" in answer.headers
    preflight = stack.http.options("/v1/chat/completions", headers={**PREFLIGHT, "Origin": OTHER})
    assert (preflight.status_code, preflight.headers[LEAVE]) == (200, "*")


def test_an_error_of_the_server_itself_may_be_read() -> None:
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/")
    def broken() -> None:
        raise RuntimeError

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(open_to([PAGE], app), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/", headers={"Origin": PAGE})

    answer = asyncio.run(ask())
    check_error(answer, 500)
    assert answer.headers[LEAVE] == PAGE


def test_without_listed_origins_there_is_no_leave(stack: Stack) -> None:
    for path in ("/v1/chat/completions", "/v1/models"):
        answer = stack.http.options(path, headers={**PREFLIGHT, "Origin": PAGE})
        check_error(answer, 405)
        assert LEAVE not in answer.headers
    assert LEAVE not in stack.http.get("/v1/models", headers={"Origin": PAGE}).headers


def test_options_without_an_origin_is_no_preflight(opened: Stack) -> None:
    check_error(opened.http.options("/v1/models", headers=KEY), 405)
    check_error(opened.http.options("/v1/models"), 401)


def by_turns(stack: Stack, path: str) -> list[tuple[int, str | None, bool]]:
    """Status, type and whether there is a body of HEAD, GET, HEAD and GET.

    Read from the connection itself: a body behind the head would be taken for the next answer.
    """
    host, port = stack.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    found = []
    for method in ("HEAD", "GET", "HEAD", "GET"):
        connection.request(method, path)
        answer = connection.getresponse()
        found.append((answer.status, answer.getheader("content-type"), len(answer.read()) > 0))
    connection.close()
    return found


@pytest.mark.parametrize("path", PATHS)
def test_head_is_get_without_a_body(stack: Stack, path: str) -> None:
    """The request moves the engine on: one that has stood still for long is not ready."""
    assert stack.chat(max_tokens=1).status_code == 200
    found = by_turns(stack, path)
    kind = found[1][1]
    assert found == [(200, kind, False), (200, kind, True)] * 2


def test_head_says_what_get_says(opened: Stack) -> None:
    assert opened.http.head("/v1/models").status_code == 401
    assert opened.http.head("/v1/models", headers=KEY).status_code == 200
    answer = opened.http.head("/v1/models/other", headers=KEY)
    assert (answer.status_code, answer.content) == (404, b"")
    assert opened.http.head("/v1/chat/completions", headers=KEY).status_code == 405
