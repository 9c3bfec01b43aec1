"""Fetches images by http and https, from the hosts that the operator allows and from public addresses alone.

A name is resolved once for each connection, every address that it has is checked, and the connection goes to one of those: a name
that changes its meaning between check and use is of no use. TLS and the Host header keep the name. Redirects are followed here,
each as if it had been asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx

from ep_runtime.frontend.vision.addresses import is_public
from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.hosts import HostRule

MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = (("User-Agent", "ep-runtime"), ("Accept", "*/*"), ("Accept-Encoding", "identity"), ("Connection", "close"))
AddressCheck = Callable[[str], bool]
Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, in the system's order. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPolicy:
    """What may be fetched. `hosts` empty: nothing. `most` bytes and `seconds` are of one image, redirects included."""

    hosts: tuple[HostRule, ...]
    most: int
    seconds: float
    address_allowed: AddressCheck = is_public
    resolve: Resolve = resolve


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were checked. Its connections are closed by `aclose`: the library leaves one whose TLS handshake
    is cancelled.
    """

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self._inner = httpcore.AnyIOBackend()
        self._opened: list[httpcore.AsyncNetworkStream] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolve once, refuse a name that has any address that is not allowed, and connect to the first that answers."""
        addresses = await self._addresses(host, port)
        for address in addresses[:-1]:
            with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._connect(address, port, timeout, local_address, socket_options)
        return await self._connect(addresses[-1], port, timeout, local_address, socket_options)

    async def _connect(self, address: str, *how: Any) -> httpcore.AsyncNetworkStream:
        stream = await self._inner.connect_tcp(address, *how)
        self._opened.append(stream)
        return stream

    async def aclose(self) -> None:
        """Close what was opened, whatever has become of it."""
        for stream in self._opened:
            await stream.aclose()

    async def _addresses(self, host: str, port: int) -> Sequence[str]:
        try:
            addresses = await self._policy.resolve(host, port)
        except (OSError, UnicodeError):
            addresses = []
        if not addresses:
            raise MediaError(f"cannot be fetched: the host {host!r} has no address")
        if not all(self._policy.address_allowed(address) for address in addresses):
            raise MediaError(f"cannot be fetched: the host {host!r} has an address that is not public")
        return addresses

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Never."""
        raise MediaError("cannot be fetched from a socket of this host")

    async def sleep(self, seconds: float) -> None:
        """The library's pauses."""
        await asyncio.sleep(seconds)


class Fetcher:
    """Fetches under one policy. `context` is of TLS; the system's roots without one."""

    def __init__(self, policy: FetchPolicy, context: ssl.SSLContext | None = None) -> None:
        self._policy = policy
        self._context = context

    async def fetch(self, url: str) -> bytes:
        """What this URL gives. Raises MediaError."""
        policy = self._policy
        if not policy.hosts:
            raise MediaError("is a URL, and the server fetches none: send the data itself (data:image/...;base64,...)")
        if self._context is None:
            self._context = ssl.create_default_context()
        try:
            async with asyncio.timeout(policy.seconds):
                return await self._follow(url)
        except (TimeoutError, httpcore.TimeoutException):
            raise MediaError(f"cannot be fetched within {policy.seconds:g} s") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError) as error:
            raise MediaError(f"cannot be fetched: {str(error) or type(error).__name__}") from error

    async def _follow(self, url: str) -> bytes:
        target = parse_url(url)
        for _ in range(MAX_REDIRECTS + 1):
            check_url(target, self._policy.hosts)
            found = await self._get(target)
            if isinstance(found, bytes):
                return found
            target = found
        raise MediaError(f"cannot be fetched: more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: httpx.URL) -> bytes | httpx.URL:
        """The body, or where the server redirects to."""
        # A dead address leaves time for another of the same name.
        patience = {"timeout": {"connect": self._policy.seconds / 2}}
        at = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        async with (
            contextlib.aclosing(CheckedBackend(self._policy)) as backend,
            httpcore.AsyncConnectionPool(self._context, network_backend=backend) as pool,
            pool.stream("GET", at, headers=list(HEADERS), extensions=patience) as response,
        ):
            headers = {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
            if response.status in REDIRECTS and "location" in headers:
                return parse_url(headers["location"], url)
            if response.status != 200:
                raise MediaError(f"cannot be fetched: {url.host} answered with status {response.status}")
            if headers.get("content-encoding", "identity").lower() != "identity":
                raise MediaError(f"cannot be fetched: {url.host} compresses it, though asked not to")
            return await self._body(response, headers.get("content-length", ""))

    async def _body(self, response: httpcore.Response, declared: str) -> bytes:
        most = self._policy.most
        pieces, size = [], int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 20 else 0
        if size > most:
            raise MediaError(f"has {size} bytes; the server takes {most}")
        size = 0
        async for piece in response.aiter_stream():
            size += len(piece)
            if size > most:
                raise MediaError(f"has more than {most} bytes")
            pieces.append(piece)
        return b"".join(pieces)


def parse_url(text: str, base: httpx.URL | None = None) -> httpx.URL:
    """The URL, relative to `base` if there is one. Raises MediaError."""
    try:
        return httpx.URL(text) if base is None else base.join(text)
    except (httpx.InvalidURL, ValueError) as error:
        raise MediaError(f"has a URL that cannot be read: {error}") from None


def check_url(url: httpx.URL, hosts: tuple[HostRule, ...]) -> None:
    """Raise MediaError unless the operator's list allows it."""
    if url.scheme not in ("http", "https"):
        raise MediaError(f"cannot be fetched by {url.scheme[:20]!r}: http and https are")
    if url.userinfo:
        raise MediaError("has a URL with a user name, which is not sent")
    host = url.raw_host.decode("ascii").lower().removesuffix(".")
    port = url.port or (443 if url.scheme == "https" else 80)
    if not host or not any(rule.allows(host, port) for rule in hosts):
        raise MediaError(f"cannot be fetched: the operator does not allow {host[:200]}:{port}")
