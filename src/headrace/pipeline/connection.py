"""One blocking connection to a server, for Spark's tasks: they have no event loop, and live for a moment.

Only what is safe to repeat goes through here (reads, and pushes that carry an id with `idTtl`): when the connection
breaks, it is made anew and the command is sent again, for up to `patience_s`.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import msgspec

from headrace.errors import HeadraceError

_TIMEOUT_S: Final = 60.0
PATIENCE_S: Final = 30.0
"""How long a server may be away."""
_encode: Final = msgspec.msgpack.Encoder().encode


def default_url() -> str:
    return os.environ.get("HEADRACE_URL", "headrace://localhost:6789")


class ServerRefused(HeadraceError):
    """The server answered with an error; repeating would change nothing."""


class Address(msgspec.Struct, frozen=True):
    """Where a server is and how to be let in."""

    host: str
    port: int
    token: str | None
    is_secure: bool

    @classmethod
    def parse(cls, url: str, token: str | None = None) -> Address:
        parts = urlsplit(url)
        if parts.scheme not in ("headrace", "headraces") or not parts.hostname:
            raise HeadraceError(f"{url!r} is no address of a server: write headrace://host:6789 (TLS: headraces://)")
        given = parse_qs(parts.query).get("token", [None])[0]
        token = token or given or os.environ.get("HEADRACE_TOKEN")
        return cls(parts.hostname, parts.port or 6789, token, parts.scheme == "headraces")


class Connection:
    """`call` asks one thing; `stream` keeps several questions under way and answers in order."""

    def __init__(self, address: Address, *, patience_s: float = PATIENCE_S) -> None:
        self._address = address
        self._patience_s = patience_s
        self._socket: socket.socket | None = None

    def call(self, cmd: str, **fields: Any) -> dict[str, Any]:
        return next(self.stream([{"cmd": cmd, **fields}], in_flight=1))

    def stream(self, commands: Iterable[dict[str, Any]], in_flight: int) -> Iterator[dict[str, Any]]:
        """The replies to `commands`, in their order; the first refusal ends them."""
        for reply in self.answers(commands, in_flight):
            if reply.get("ok") is not True:
                raise ServerRefused(str(reply.get("error") or "the server refused without a reason"))
            yield reply

    def answers(self, commands: Iterable[dict[str, Any]], in_flight: int) -> Iterator[dict[str, Any]]:
        """The replies, whatever they say. After a break, what was not answered is asked again."""
        source = iter(commands)
        unanswered: list[bytes] = []
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                self._open(unanswered)
                while len(unanswered) < in_flight and (command := next(source, None)) is not None:
                    unanswered.append(_encode(command))
                    self._send(unanswered[-1])
                if not unanswered:
                    return
                reply = self._receive()
            except OSError as error:
                self._pause(error, deadline)
                continue
            unanswered.pop(0)
            deadline = time.monotonic() + self._patience_s
            yield reply

    def _open(self, unanswered: list[bytes]) -> None:
        if self._socket is not None:
            return
        address = self._address
        plain = socket.create_connection((address.host, address.port), timeout=_TIMEOUT_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secure = ssl.create_default_context() if address.is_secure else None
        self._socket = secure.wrap_socket(plain, server_hostname=address.host) if secure else plain
        if address.token:
            self._send(_encode({"cmd": "Auth", "token": address.token}))
            reply = self._receive()
            if reply.get("ok") is not True:
                self.close()
                raise ServerRefused(f"the server at {address.host}:{address.port} does not know this token")
        for frame in unanswered:
            self._send(frame)

    def _pause(self, error: OSError, deadline: float) -> None:
        self.close()
        if time.monotonic() >= deadline:
            where = f"{self._address.host}:{self._address.port}"
            raise HeadraceError(
                f"no answer from the server at {where} for {self._patience_s:.0f} s: {error}"
            ) from error
        time.sleep(0.2)

    def _send(self, frame: bytes) -> None:
        assert self._socket is not None
        self._socket.sendall(struct.pack(">I", len(frame)) + frame)

    def _receive(self) -> dict[str, Any]:
        (length,) = struct.unpack(">I", self._exactly(4))
        reply = msgspec.msgpack.decode(self._exactly(length), ext_hook=_unknown_extension)
        return reply if isinstance(reply, dict) else {}

    def _exactly(self, size: int) -> bytearray:
        assert self._socket is not None
        received = bytearray(size)
        view, at = memoryview(received), 0
        while at < size:
            count = self._socket.recv_into(view[at:])
            if not count:
                raise ConnectionError("the server closed the connection")
            at += count
        return received

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _unknown_extension(code: int, data: memoryview) -> None:
    """JavaScript's undefined, and whatever else JSON has no word for."""
    return None
