"""One connection to one Valkey server: many calls in flight, written together, answered in order.

Calls of one turn of the loop leave in one write. A connection that is lost fails what was in flight (whether it was
carried out is unknown) and is reopened by the next call, at most once per backoff interval. Every call has a
deadline: if the server misses it the connection is closed, because replies come in order.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import libvalkey

from headrace.backends.valkey.url import ValkeyUrl
from headrace.errors import ConfigError, StorageUnavailable

_PAUSES: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_MAX_IN_FLIGHT: Final = 100_000
_LASTING: Final = re.compile(r"WRONGPASS|NOAUTH|NOPERM|DENIED|ERR (?!max number of clients)")
"""Errors of a server that somebody has to do something about; it says others while it starts or changes its role."""

Argument = bytes | str | int | float
Answered = asyncio.Future[Any]
ServerError = libvalkey.ReplyError


class Unreachable(StorageUnavailable):
    """No connection could be made: nothing was sent."""


class Unfit(StorageUnavailable):
    """The server answers, but cannot be worked with."""


class Hopeless(StorageUnavailable, ConfigError):
    """Waiting for the server is in vain."""


def is_lasting(error: BaseException | None) -> bool:
    """Whether waiting does not help: the server, its users or our URL have to be changed."""
    if isinstance(error, ServerError):
        return _LASTING.match(str(error)) is not None
    if error is None or isinstance(error, Unfit | ssl.SSLCertVerificationError):
        return error is not None
    return is_lasting(error.__cause__)


class _Pipe(asyncio.Protocol):
    """The socket of a connection while it lasts."""

    def __init__(self, on_push: Callable[[Any], None] | None) -> None:
        self._reader = libvalkey.Reader()
        self._waiting: deque[Answered] = deque()
        self._out: list[bytes] = []
        self._on_push = on_push
        self._transport: asyncio.Transport | None = None
        self.answered = 0
        self.is_open = True
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are of classes of their own

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                if self._on_push is not None and isinstance(reply, list) and reply[0] == b"message":
                    self._on_push(reply)
                    continue
                if self._on_push is not None and not self._waiting:
                    continue  # one more answer to a SUBSCRIBE of several channels
                self.answered += 1
                future = self._waiting.popleft()
                if future.done():
                    continue
                if isinstance(reply, ServerError):
                    future.set_exception(reply)
                    if str(reply).startswith("READONLY"):  # and its name may stand for the new primary by now
                        self.fail("Valkey became a replica here")
                        return
                else:
                    future.set_result(reply)
        except (libvalkey.ProtocolError, IndexError) as error:
            self.fail(f"Valkey sent what cannot be read: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(f"the connection to Valkey was lost{f': {exc}' if exc else ''}")

    def fail(self, text: str) -> None:
        self.is_open = False
        if not self.lost.done():
            self.lost.set_result(None)
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                future.set_exception(StorageUnavailable(text))
        if self._transport is not None:
            self._transport.abort()

    def send(self, packed: bytes, loop: asyncio.AbstractEventLoop) -> Answered:
        if not self.is_open:
            raise StorageUnavailable("the connection to Valkey was lost")
        if len(self._waiting) >= _MAX_IN_FLIGHT:
            raise StorageUnavailable("too many calls wait for Valkey")
        future = loop.create_future()
        self._waiting.append(future)
        if not self._out:
            loop.call_soon(self._write)
        self._out.append(packed)
        return future

    def _write(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and self.is_open:
            self._transport.write(b"".join(out))

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.close()


class Connection:
    def __init__(self, url: ValkeyUrl, host: str, port: int, *, on_push: Callable[[Any], None] | None = None) -> None:
        self._url = url
        self.host, self.port = host, port
        self.timeout_s = url.timeout_s
        self._on_push = on_push
        self._pipe: _Pipe | None = None
        self._opening: asyncio.Task[_Pipe] | None = None
        self._failures = 0
        self._refused_until = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def call(self, *command: Argument) -> Any:
        packed = libvalkey.pack_command(command)
        pipe = self._pipe
        if pipe is None or not pipe.is_open:
            pipe = await self._connected()
        return await self._send(pipe, packed)

    async def call_many(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Several commands in one write; the first error is raised when all are answered."""
        replies = await self.call_each(commands)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies

    async def call_each(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """The same with errors among the replies."""
        pipe = self._pipe
        if pipe is None or not pipe.is_open:
            pipe = await self._connected()
        futures = [self._send(pipe, libvalkey.pack_command(tuple(command))) for command in commands]
        return await asyncio.gather(*futures, return_exceptions=True)

    def _send(self, pipe: _Pipe, packed: bytes) -> Answered:
        loop = asyncio.get_running_loop()
        if self._watch is None:
            self._watch = loop.call_later(self._url.timeout_s, self._check_progress, pipe, pipe.answered)
        return pipe.send(packed, loop)

    def _check_progress(self, pipe: _Pipe, answered: int) -> None:
        """Within one period of the deadline at least one answer has to come while any is due."""
        self._watch = None
        if not pipe.in_flight:
            return
        if pipe.answered == answered:
            pipe.fail(f"Valkey did not answer within {self._url.timeout_s:g} s")
            return
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(self._url.timeout_s, self._check_progress, pipe, pipe.answered)

    @property
    def is_away(self) -> bool:
        """Whether it could not be reached the last time somebody tried."""
        return self._failures > 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for an answer or for the connection."""
        is_opening = self._opening is not None and not self._opening.done()
        return not is_opening and (self._pipe is None or not self._pipe.in_flight)

    async def lost(self) -> None:
        """Return when the connection breaks."""
        if self._pipe is not None and self._pipe.is_open:
            await asyncio.shield(self._pipe.lost)

    # -- connecting ----------------------------------------------------------------------------------------------------

    async def _connected(self) -> _Pipe:
        if self._is_closed:
            raise StorageUnavailable("the connection to Valkey is closed")
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():
                raise StorageUnavailable("the connection to Valkey is closed") from None
            raise

    async def _open(self) -> _Pipe:
        loop = asyncio.get_running_loop()
        wait = self._refused_until - loop.time()
        if wait > 0:
            await asyncio.sleep(wait)
        try:
            pipe = await asyncio.wait_for(self._dial(), self._url.timeout_s)
        except (OSError, TimeoutError, StorageUnavailable, ServerError, ssl.SSLError) as error:
            self._refused_until = loop.time() + _PAUSES[min(self._failures, len(_PAUSES) - 1)]
            self._failures += 1
            what = "refused" if isinstance(error, ServerError) else "cannot be reached"
            is_refused = isinstance(error, ConnectionRefusedError)  # asyncio adds a number and the address
            text = "Connection refused" if is_refused else str(error) or type(error).__name__
            raise Unreachable(f"Valkey at {self.host}:{self.port} {what}: {text}") from error
        self._failures = 0
        self._refused_until = loop.time() + _PAUSES[0]  # if it does not last
        self._pipe = pipe
        self._stop_watch()  # that of the pipe before says nothing of this one
        return pipe

    async def _dial(self) -> _Pipe:
        loop = asyncio.get_running_loop()
        _, pipe = await loop.create_connection(lambda: _Pipe(self._on_push), self.host, self.port, ssl=_tls(self._url))
        try:
            await self._greet(pipe)
        except BaseException:
            pipe.fail("the greeting was not answered")  # nobody else has it
            raise
        return pipe

    async def _greet(self, pipe: _Pipe) -> None:
        greetings: list[tuple[Argument, ...]] = []
        if self._url.password is not None:
            greetings.append(("AUTH", *filter(None, (self._url.username,)), self._url.password))
        if self._url.db:
            greetings.append(("SELECT", self._url.db))
        greetings.append(("CLIENT", "SETNAME", "headrace"))
        for greeting in greetings:
            await pipe.send(libvalkey.pack_command(greeting), asyncio.get_running_loop())

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def close(self) -> None:
        self._is_closed = True
        self._stop_watch()
        if self._opening is not None:
            self._opening.cancel()
        if self._pipe is not None:
            self._pipe.close()
            await asyncio.sleep(0)


def _tls(url: ValkeyUrl) -> ssl.SSLContext | None:
    if not url.is_tls:
        return None
    context = ssl.create_default_context(cafile=url.ca_file)
    if url.is_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
