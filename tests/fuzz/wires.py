"""Requests that are strange below JSON: heads, chunks, pauses, pipelines, and clients that go away."""

from __future__ import annotations

import random

from tests.fuzz.requests import BODIES, CHAT, COMPLETE, JSON_KINDS, READS, Visit, dump, head, pick, request
from tests.fuzz.values import INTEGERS, TEXTS, mutate_bytes

METHODS = ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get", "POST ", "P\0ST", "X" * 200]
TARGETS = [
    "/",
    "//",
    "*",
    "http://x/health",
    "/v1/models/%00",
    "/v1/models/..%2f..",
    "/v1//models",
    "/health?a=%ff&b",
    "/%",
    "/\xff",
]
TARGETS += [
    "/v1/models/" + "a" * 3000,
    "/v1/chat/completions/",
    "/docs",
    "/health#x",
    "/metrics?name[]=x",
    "/" + "x" * 70_000,
    "health",
]
LINES = [
    "Transfer-Encoding: chunked\r\n",
    "Transfer-Encoding: gzip, chunked\r\n",
    "Content-Length: 5\r\nContent-Length: 6\r\n",
    "Content-Length: -1\r\n",
    "Content-Length: 99999999999999999999\r\n",
    "Content-Length: ²\r\n",
    "Expect: 100-continue\r\n",
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n",
    "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: x\r\n",
    "Content-Encoding: gzip\r\n",
    "Content-Type: text/plain\r\n",
    "Content-Type: application/json; charset=utf-16\r\n",
    "Content-Type: \r\n",
    "Authorization: Bearer \xff\r\n",
    "Host: y\r\nHost: z\r\n",
    " folded: a\r\n b\r\n",
    "no colon here\r\n",
    "X: " + "y" * 70_000 + "\r\n",
    "".join(f"X-{number}: y\r\n" for number in range(300)),
    "Connection: close\r\n",
    "Origin: http://evil\r\nAccess-Control-Request-Method: POST\r\n",
    "\0: \0\r\n",
    "Accept: \r\nRange: bytes=0-1\r\nIf-None-Match: *\r\n",
    "X-Forwarded-For: 1.2.3.4\r\nForwarded: for=x\r\n",
]


def heads(rng: random.Random) -> Visit:
    """Odd methods, targets, versions and header lines."""
    body = dump(BODIES[CHAT][0])
    method = rng.choice(["POST", "GET", rng.choice(METHODS)])
    target = rng.choice([CHAT, rng.choice(READS), rng.choice(TARGETS)])
    extra = "".join(rng.choice(LINES) for _ in range(rng.choice([0, 1, 1, 2])))
    version = rng.choice(["1.1", "1.1", "1.0", "0.9", "2.0", "x"])
    made = head(target, rng.choice([None, len(body), rng.choice(INTEGERS)]), extra, method, version) + body
    if rng.random() < 0.2:
        made = mutate_bytes(rng, made)
    if rng.random() < 0.05:
        made = rng.choice(
            [
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(40),
                b"\x16\x03\x01\x02\x00" + bytes(512),
                b"\r\n" * 1000,
                rng.randbytes(2000),
            ]
        )
    return Visit("heads", [made], end=rng.choice(["read", "read", "half"]))


def reads(rng: random.Random) -> Visit:
    """Plain GETs."""
    return Visit("reads", [head(rng.choice(READS), None, method="GET")], strict=True)


def chunks(rng: random.Random) -> Visit:
    """A body in chunks, right or wrong."""
    path, body = pick(rng)
    data = dump(body)
    parts, at = [], 0
    while at < len(data):
        size = rng.choice([1, 5, 50, 1000])
        piece = data[at : at + size]
        at += size
        parts.append(f"{len(piece):x}{rng.choice(['', ';a=b', ' '])}\r\n".encode() + piece + b"\r\n")
    whole = b"".join(parts) + rng.choice([b"0\r\n\r\n", b"0\r\nTrailer: x\r\n\r\n", b"000\r\n\r\n"])
    broken = rng.random() < 0.5
    if broken:
        bad = [
            mutate_bytes(rng, whole),
            b"zz\r\n" + whole,
            b"-1\r\nx\r\n",
            b"f" * 20 + b"\r\n" + whole,
            b"ffffffff\r\nx",
            whole[: len(whole) // 2],
        ]
        whole = rng.choice(bad)
    return Visit("chunks", [head(path, None, "Transfer-Encoding: chunked\r\n") + whole], end="half" if broken else "read")


def slices(rng: random.Random) -> Visit:
    """Any JSON request in many small sends."""
    made = rng.choice(JSON_KINDS)(rng)
    data = made.pieces[0][:3000] if len(made.pieces[0]) > 100_000 else made.pieces[0]
    size = rng.choice([1, 3, 50, 500]) if len(data) < 600 else rng.choice([100, 500])
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    whole = len(data) == len(made.pieces[0])
    return Visit(f"slices of {made.kind}", pieces, end="read" if whole else "half", strict=made.strict and whole)


def halves(rng: random.Random) -> Visit:
    """A request of which a part is missing, then silence, an end or a reset."""
    path, body = pick(rng)
    data = request(path, dump(body))
    return Visit("halves", [data[: rng.randrange(1, len(data))]], end=rng.choice(["half", "close", "reset", "silent"]))


def pipelines(rng: random.Random) -> Visit:
    """Several requests at once."""
    made = [rng.choice(JSON_KINDS)(rng).pieces[0] for _ in range(rng.choice([2, 3, 6]))]
    return Visit("pipelines", [b"".join(data for data in made if len(data) < 50_000)], end="half")


def leavers(rng: random.Random) -> Visit:
    """Clients who go before, during or just after their answer."""
    body = {**rng.choice(BODIES[CHAT] + BODIES[COMPLETE]), "stream": rng.random() < 0.7}
    body.pop("stream_options", None)
    body.pop("prompt_logprobs", None)
    data = request(CHAT if "messages" in body else COMPLETE, dump(body))
    return Visit("leavers", [data], end=rng.choice(["close", "reset", "glance", "glance"]))


def large(rng: random.Random) -> Visit:
    """Bodies near the server's limit, and claims beyond it."""
    size = rng.choice([100_000, 900_000, 1_048_576, 1_100_000])
    text = rng.choice(TEXTS[1:3]) or "a"
    body = {"prompt": (text * size)[:size], "max_tokens": 1}
    return Visit("large", [request(rng.choice([COMPLETE, "/tokenize"]), dump(body))])


WIRE_KINDS = (reads, heads, heads, chunks, slices, halves, pipelines, leavers, leavers, large)


def visit(rng: random.Random) -> Visit:
    """One client's visit: two in three are about the body, the others about the wire."""
    kinds = JSON_KINDS if rng.randrange(3) else WIRE_KINDS
    if kinds is WIRE_KINDS and rng.randrange(10):
        return rng.choice(WIRE_KINDS[:-1])(rng)
    return rng.choice(kinds)(rng)
