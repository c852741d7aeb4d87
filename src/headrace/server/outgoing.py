"""One POST to a checked address: the only outgoing HTTP requests of this server.

Rules:
- A name is looked up once per request, every address it has is checked, and the socket is connected to exactly one of
  those addresses. Nothing between the check and the connection asks DNS again, so an answer that changes (rebinding)
  changes nothing.
- Redirects are responses like any other: they are reported, never followed. Proxies of the environment are not used.
- Everything has a bound: the total time, the head and body of the response, the threads that wait for DNS.

Names are resolved in threads of our own: the resolver may hang for long, and the loop's threads sync the disk.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from typing import Final
from urllib.parse import unquote_to_bytes

from headrace.addresses import Address, Destination, UrlRules, check_address
from headrace.errors import InvalidCommand

TIMEOUT: Final = 10.0
MAX_ANSWER_BYTES: Final = 64 * 1024

_MAX_LOOKUPS: Final = 32
_MAX_TRIED_ADDRESSES: Final = 4
_NEXT_ADDRESS_AFTER: Final = 3.0
_BODY_PATIENCE: Final = 1.0
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?=[ \r])")
_CONTENT_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,12})[ \t]*\r\n", re.IGNORECASE)

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a name, as texts; OSError when it has none."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class DeliveryFailed(Exception):
    """The request did not reach its goal; the text says why, for the owner of the URL."""


class Forbidden(DeliveryFailed):
    """The name leads to where no request may go: trying again is no use."""


class Lookups:
    """Asks DNS in daemon threads: one that hangs delays nothing but its own request, not even the end of the server."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(_MAX_LOOKUPS)

    async def __call__(self, name: str, port: int) -> list[str]:
        if not self._free.acquire(blocking=False):
            raise OSError("too many name lookups hang")
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[str]] = loop.create_future()
        threading.Thread(target=self._look_up, args=(name, port, loop, found), daemon=True).start()
        return await found

    def _look_up(self, name: str, port: int, loop: asyncio.AbstractEventLoop, found: asyncio.Future[list[str]]) -> None:
        answer: list[str] | OSError
        try:
            rows = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            answer = list(dict.fromkeys(str(row[4][0]) for row in rows))
        except (OSError, UnicodeError) as error:
            answer = error if isinstance(error, OSError) else OSError("not a name")
        finally:
            self._free.release()
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_hand_over, found, answer)


def _hand_over(found: asyncio.Future[list[str]], answer: list[str] | OSError) -> None:
    if found.done():
        return
    if isinstance(answer, OSError):
        found.set_exception(answer)
    else:
        found.set_result(answer)


class Outgoing:
    """Posts to URLs within `rules`. `resolve` may be replaced: it is the only thing that asks DNS."""

    def __init__(self, rules: UrlRules, resolve: Resolve | None = None, timeout: float = TIMEOUT) -> None:
        self.resolve: Resolve = resolve or Lookups()
        self._rules = rules
        self._timeout = timeout
        self._tls: ssl.SSLContext | None = None

    async def post(self, to: Destination, headers: Mapping[str, str], body: bytes) -> int:
        """The status of the answer. DeliveryFailed when there was none in time."""
        stream: Stream | None = None
        try:
            async with asyncio.timeout(self._timeout):
                stream = await self._connect(to, await self._checked_addresses(to))
                stream[1].write(_request(to, headers, body))
                await stream[1].drain()
                status, length = await _read_head(stream[0])
        except TimeoutError:
            _hang_up(stream, abruptly=True)
            raise DeliveryFailed(f"no answer within {self._timeout:g} s") from None
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            _hang_up(stream, abruptly=True)
            raise DeliveryFailed(_told(error)) from error
        except BaseException:
            _hang_up(stream, abruptly=True)
            raise
        _hang_up(stream, abruptly=not await _read_body(stream[0], length))
        return status

    async def _checked_addresses(self, to: Destination) -> list[Address]:
        if not isinstance(to.host, str):
            addresses = [to.host]
        else:
            addresses = [ip_address(text) for text in await self.resolve(to.host, to.port)]
        if not addresses:
            raise DeliveryFailed("the name has no address")
        for address in addresses:
            try:
                check_address(address, self._rules)
            except InvalidCommand as refusal:
                raise Forbidden(str(refusal)) from None
        return addresses[:_MAX_TRIED_ADDRESSES]

    async def _connect(self, to: Destination, addresses: list[Address]) -> Stream:
        """A connection to the first address that takes one."""
        tls = await self._tls_context() if to.scheme == "https" else None
        for address in addresses[:-1]:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(_NEXT_ADDRESS_AFTER):
                    return await _open(address, to, tls)
        return await _open(addresses[-1], to, tls)

    async def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            # Reading the certificates of the system takes tens of milliseconds: not in the loop.
            self._tls = await asyncio.to_thread(ssl.create_default_context)
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls


async def _open(address: Address, to: Destination, tls: ssl.SSLContext | None) -> Stream:
    """Connect the socket ourselves: a numeric address leaves nothing to look up."""
    family = socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (str(address), to.port))
        if tls is None:
            return await asyncio.open_connection(sock=sock, limit=MAX_ANSWER_BYTES)
        return await asyncio.open_connection(
            sock=sock,
            limit=MAX_ANSWER_BYTES,
            ssl=tls,
            server_hostname=str(to.host).rstrip("."),
            ssl_shutdown_timeout=_BODY_PATIENCE,
        )
    except BaseException:
        sock.close()
        raise


def _request(to: Destination, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [f"POST {to.target} HTTP/1.1", f"Host: {to.authority}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if to.credentials:
        lines.append("Authorization: Basic " + base64.b64encode(unquote_to_bytes(to.credentials)).decode("ascii"))
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + body


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, int | None]:
    """Status and length of the final answer; interim ones (1xx) are passed over."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        line = _STATUS_LINE.match(head)
        if line is None:
            raise DeliveryFailed("the answer is not HTTP")
        status = int(line[1])
        if status >= 200 or status == 101:
            length = _CONTENT_LENGTH.search(head)
            return status, 0 if status in (204, 304) else int(length[1]) if length else None


async def _read_body(reader: asyncio.StreamReader, length: int | None) -> bool:
    """Read the body away, so that the other side sees an orderly end; whether all of it came."""
    if length is not None and length > MAX_ANSWER_BYTES:
        return False
    left = MAX_ANSWER_BYTES if length is None else length
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_BODY_PATIENCE):
            while left > 0:
                chunk = await reader.read(left)
                if not chunk:
                    return True
                left -= len(chunk)
            return length is not None
    return False


def _hang_up(stream: Stream | None, *, abruptly: bool) -> None:
    if stream is None:
        return
    if abruptly:
        stream[1].transport.abort()
    else:
        stream[1].close()


def _told(error: Exception) -> str:
    """The reason in words for the owner of the URL: nothing of our own insides."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or 'unknown reason'}"
    if isinstance(error, socket.gaierror):
        return "the name could not be looked up"
    if isinstance(error, EOFError):
        return "the connection ended before the answer"
    if isinstance(error, asyncio.LimitOverrunError):
        return f"the head of the answer is longer than {MAX_ANSWER_BYTES} bytes"
    assert isinstance(error, OSError)
    text = os.strerror(error.errno) if error.errno else str(error) or "the connection failed"
    return text[0].lower() + text[1:]
