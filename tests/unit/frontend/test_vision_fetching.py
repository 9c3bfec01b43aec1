"""Fetching images: which addresses and hosts, names that change their meaning, redirects, and limits."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ep_runtime.frontend.vision.addresses import is_public
from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.fetching import Fetcher, FetchPolicy, check_url, parse_url, resolve
from ep_runtime.frontend.vision.hosts import parse_hosts

PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "172.15.0.1", "172.32.0.1", "100.63.255.255", "2606:4700::1111", "2a00:1450::1"]
NOT_PUBLIC = [
    "127.0.0.1",
    "127.1.2.3",
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "100.127.255.255",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::8.8.8.8",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "::ffff:0:8.8.8.8",
    "64:ff9b::8.8.8.8",
    "64:ff9b::7f00:1",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:db8::1",
    "2001:10::1",
    "2002:7f00:1::",
    "2002:808:808::",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd12:3456::1",
    "fe80::1",
    "fe80::1%eth0",
    "2606:4700::1111%eth0",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "4000::1",
    "localhost",
    "1.1.1",
    "0x7f.1",
    "2130706433",
    "127.0.0.1:80",
    "1.1.1.1/32",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", [*NOT_PUBLIC, "", " "])
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    ("rules", "url", "allowed"),
    [
        ("example.org", "https://example.org/a.png", True),
        ("example.org", "http://EXAMPLE.org./a.png?b#c", True),
        ("EXAMPLE.org", "http://example.org/", True),
        ("example.org", "http://example.org:80/", True),
        ("example.org", "http://example.org:443/", True),
        ("example.org", "http://example.org:8080/", False),
        ("example.org:8080", "http://example.org:8080/", True),
        ("example.org:8080", "http://example.org/", False),
        ("example.org", "http://www.example.org/", False),
        ("example.org", "http://example.org.evil.net/", False),
        ("example.org", "http://evilexample.org/", False),
        ("*.example.org", "http://a.b.example.org/", True),
        ("*.example.org", "http://example.org/", False),
        ("*.example.org", "http://evilexample.org/", False),
        ("*", "https://anything.net/", True),
        ("*", "https://anything.net:22/", False),
        ("example.org", "http://example.org@evil.net/", False),
        ("*", "http://user:password@example.org/", False),
        ("example.org", "http://evil.net#@example.org/", False),
        ("example.org", "http://evil.net\\@example.org/", False),
        ("*", "ftp://example.org/", False),
        ("*", "gopher://example.org/", False),
        ("*", "http:///a.png", False),
        ("[2606:4700::1111]", "http://[2606:4700::1111]/", True),
        ("127.0.0.1:9000", "http://127.0.0.1:9000/", True),
        ("xn--bcher-kva.example", "http://bücher.example/", True),
    ],
)
def test_hosts(rules: str, url: str, allowed: bool) -> None:
    hosts = parse_hosts(rules.split())

    def check() -> None:
        check_url(parse_url(url), hosts)

    if allowed:
        check()
    else:
        with pytest.raises(MediaError):
            check()


@pytest.mark.parametrize(
    "entry", ["", "https://example.org", "example.org/", "exa mple", "*example.org", "a.*.org", "a:0", "a:70000", "a:"]
)
def test_entries_that_are_no_hosts(entry: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        parse_hosts([entry])


def respond(body: bytes, *headers: str, status: str = "200 OK", length: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, *([f"Content-Length: {len(body)}"] if length else []), "Connection: close", "", ""]
    return "\r\n".join(lines).encode() + body


class Site:
    """A loopback server that answers by path (None: never), and notes what was asked."""

    def __init__(self, answers: dict[str, bytes | None]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            host = next(line for line in head.split("\r\n") if line.lower().startswith("host:")).split(": ")[1]
            self.asked.append((host, path))
            answer = self.answers[path]
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def fetch(
    path: str,
    answers: dict[str, bytes | None],
    *,
    hosts: str = "site.test:{port}",
    names: Callable[[str, int], Awaitable[list[str]]] | None = None,
    allowed: Callable[[str], bool] = lambda address: address == "127.0.0.1",
    context: ssl.SSLContext | None = None,
    **limits: Any,
) -> tuple[bytes | str, Site]:
    """What http://site.test:PORT/path gives, or the error's message. All names lead to the loopback server without `names`."""

    async def loopback(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async def main() -> tuple[bytes | str, Site]:
        site = Site(answers)
        server = await asyncio.start_server(site.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        site.answers = {
            at: None if answer is None else answer.replace(b"{port}", str(port).encode()) for at, answer in answers.items()
        }
        policy = FetchPolicy(
            hosts=parse_hosts(hosts.format(port=port).split()),
            address_allowed=allowed,
            resolve=names or loopback,
            **{"most": 1000, "seconds": 30.0, **limits},
        )
        async with server:
            try:
                found: bytes | str = await Fetcher(policy, context).fetch(path.format(port=port))
            except MediaError as error:
                found = str(error)
        return found, site

    return asyncio.run(main())


SITE = "http://site.test:{port}"


def test_what_is_there_comes_with_the_right_host() -> None:
    found, site = fetch(f"{SITE}/a.png?b=c#d", {"/a.png?b=c": respond(b"image")})
    assert found == b"image"
    (host, _), *_ = site.asked
    assert host.startswith("site.test:")


def test_without_hosts_nothing_is_fetched() -> None:
    found, site = fetch(f"{SITE}/", {}, hosts="")
    assert "the server fetches none" in str(found)
    assert site.asked == []


def test_the_usual_policy_reaches_no_loopback() -> None:
    found, site = fetch(
        "http://127.0.0.1:{port}/", {"/": respond(b"secret")}, hosts="127.0.0.1:{port}", names=resolve, allowed=is_public
    )
    assert "has an address that is not public" in str(found)
    assert site.asked == []
    found, site = fetch(
        "http://localhost:{port}/", {"/": respond(b"secret")}, hosts="localhost:{port}", names=resolve, allowed=is_public
    )
    assert "has an address that is not public" in str(found)
    assert site.asked == []


@pytest.mark.parametrize("address", ["127.1", "0x7f000001", "2130706433", "017700000001", "[::ffff:127.0.0.1]", "[::1]"])
def test_other_ways_to_write_loopback(address: str) -> None:
    found, site = fetch(
        f"http://{address}:{{port}}/", {"/": respond(b"secret")}, hosts="*:{port}", names=resolve, allowed=is_public
    )
    assert isinstance(found, str)
    assert "not public" in found or "has no address" in found
    assert site.asked == []


def test_one_bad_address_of_a_name_is_enough() -> None:
    async def names(host: str, port: int) -> list[str]:
        return ["127.0.0.1", "10.0.0.1"]

    found, site = fetch(f"{SITE}/", {"/": respond(b"x")}, names=names)
    assert "has an address that is not public" in str(found)
    assert site.asked == []


def test_a_name_that_changes_its_meaning_is_resolved_once_a_connection() -> None:
    answers = iter([["127.0.0.1"], ["10.0.0.1"], ["10.0.0.1"]])
    asked = []

    async def names(host: str, port: int) -> list[str]:
        asked.append(host)
        return next(answers)

    found, _ = fetch(f"{SITE}/", {"/": respond(b"image")}, names=names)
    assert (found, asked) == (b"image", ["site.test"])
    # A redirect connects anew, and the name's new meaning is checked.
    answers, asked[:] = iter([["127.0.0.1"], ["10.0.0.1"]]), []
    hops = {"/": respond(b"", "Location: /b", status="302 Found"), "/b": respond(b"image")}
    found, site = fetch(f"{SITE}/", hops, names=names)
    assert "has an address that is not public" in str(found)
    assert [path for _, path in site.asked] == ["/"]


def test_a_name_without_an_address() -> None:
    async def names(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    assert "has no address" in str(fetch(f"{SITE}/", {}, names=names)[0])


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_redirects_are_followed(status: str) -> None:
    hops = {
        "/": respond(b"", "Location: b/c", status=status),
        "/b/c": respond(b"", "Location: http://other.test:{port}/d", status=status),
        "/d": respond(b"image"),
    }
    found, site = fetch(f"{SITE}/", hops, hosts="*:{port}")
    assert found == b"image"
    assert [path for _, path in site.asked] == ["/", "/b/c", "/d"]
    assert site.asked[2][0].startswith("other.test:")


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("http://evil.test:{port}/", "does not allow evil.test"),
        ("http://127.0.0.1/", "does not allow 127.0.0.1:80"),
        ("file:///etc/passwd", "cannot be fetched by 'file'"),
        ("gopher://site.test:{port}/", "cannot be fetched by 'gopher'"),
        ("http://a:b@site.test:{port}/", "user name"),
        ("http://site.test:22/", "does not allow site.test:22"),
        ("http://[::1/", "cannot be read"),
        ("/", "more than 3 redirects"),
    ],
)
def test_redirects_are_checked_as_if_asked_for(location: str, message: str) -> None:
    found, _ = fetch(f"{SITE}/", {"/": respond(b"", f"Location: {location}", status="302 Found")})
    assert message in str(found)


def test_a_redirect_to_a_private_address() -> None:
    async def names(host: str, port: int) -> list[str]:
        return ["127.0.0.1"] if host == "site.test" else ["169.254.169.254"]

    hop = respond(b"", "Location: http://metadata.test:{port}/", status="302 Found")
    found, _ = fetch(f"{SITE}/", {"/": hop}, hosts="*:{port}", names=names)
    assert "the host 'metadata.test' has an address that is not public" in str(found)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"200\r\n" + b"x" * 512 + b"\r\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (respond(b"x", status="404 Not Found"), "answered with status 404"),
        (respond(b"x", status="206 Partial"), "answered with status 206"),
        (respond(b"x" * 1001), "has 1001 bytes; the server takes 1000"),
        (respond(b"x" * 5000, length=False), "has more than 1000 bytes"),
        (CHUNKED * 2, "cannot be fetched"),
        (CHUNKED + (b"200\r\n" + b"x" * 512 + b"\r\n") * 3, "has more than 1000 bytes"),
        (respond(b"x", "Content-Encoding: gzip"), "compresses it"),
        (b"hello\r\n\r\n", "cannot be fetched"),
        (b"", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000, "cannot be fetched"),
    ],
)
def test_answers_that_are_refused(answer: bytes, message: str) -> None:
    assert message in str(fetch(f"{SITE}/", {"/": answer})[0])


def test_a_server_that_is_slow() -> None:
    assert "cannot be fetched within 0.3 s" in str(fetch(f"{SITE}/", {"/": None}, seconds=0.3)[0])


def test_nobody_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        found, _ = fetch(f"http://site.test:{port}/", {}, hosts=f"site.test:{port}")
    assert "cannot be fetched" in str(found)


def test_the_second_address_is_tried() -> None:
    async def names(host: str, port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]

    found, _ = fetch(f"{SITE}/", {"/": respond(b"image")}, names=names, allowed=lambda address: address.startswith("127."))
    assert found == b"image"


def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert fetch(f"{SITE}/", {"/": respond(b"image")})[0] == b"image"


def test_tls_to_a_server_without_it() -> None:
    found, _ = fetch("https://site.test:{port}/", {}, context=ssl.create_default_context(), seconds=0.5)
    assert "cannot be fetched within" in str(found)
