"""What the server's listeners have in common: their connections, opening, and closing without losing replies."""

from __future__ import annotations

import asyncio
import fcntl
import ssl
import termios
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

from headrace.config import Settings
from headrace.engine.engine import Engine
from headrace.server.session import Budget
from headrace.server.ticker import Ticker

FAREWELL_S: Final = 1.0
"""How long a client has to close a connection that has ended, once it has read what it was sent."""


class Parted(asyncio.Transport):
    """Passes for a closed transport with those who write; the real one sends what it has and goes on reading."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def is_closing(self) -> bool:
        return True

    def write(self, data: object) -> None:
        """Too late."""

    def close(self) -> None:
        """The client does that, or the listener."""

    def abort(self) -> None:
        self._transport.abort()

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()


def part(transport: asyncio.Transport) -> asyncio.Transport:
    """End the connection behind the last reply, and read on until the client closes it or the listener does.

    A close with unread input is a reset: the client would lose the replies that it has not read. With TLS the goodbye
    takes both sides anyway.
    """
    if transport.is_closing() or not transport.can_write_eof():
        transport.close()
        return transport
    transport.write_eof()
    transport.resume_reading()
    return Parted(transport)


def see_off(connection: Guest, loop: asyncio.AbstractEventLoop, unread: int = 0) -> None:
    """A client that was hung up on has a moment to close, and one more whenever it has read on; then it is left.

    `unread` is what it had to read at the look before.
    """

    def look() -> None:
        transport = connection.transport
        left = 0 if transport is None else transport.get_write_buffer_size()
        if left and left != unread:
            see_off(connection, loop, left)
        else:
            connection.abort()

    loop.call_later(FAREWELL_S, look)


class Guest(Protocol):
    """A connection, as far as its listener is concerned."""

    @property
    def is_busy(self) -> bool:
        """Whether something was received that is not answered yet."""

    still_sends: bool
    """Whether something came that is ignored; the listener sets it back at every look."""

    @property
    def transport(self) -> asyncio.Transport | None: ...
    def hear_no_more(self) -> None:
        """Ignore what comes from now on: a client that never pauses would keep the server busy."""

    def close(self) -> None: ...
    def abort(self) -> None: ...


G = TypeVar("G", bound=Guest)


class Listener(Generic[G]):
    def __init__(self, engine: Engine, settings: Settings, ticker: Ticker, tls: ssl.SSLContext | None) -> None:
        self.engine = engine
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.ticker = ticker
        self.tls = tls
        self._connections: set[G] = set()
        self._server: asyncio.Server | None = None

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    @property
    def is_full(self) -> bool:
        return len(self._connections) > self.settings.max_connections

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def new_budget(self) -> Budget | None:
        limit = self.settings.rate_limit_max_requests
        return Budget(limit, self.settings.rate_limit_window_ms) if limit else None

    def joined(self, connection: G) -> None:
        self._connections.add(connection)

    def left(self, connection: G) -> None:
        self._connections.discard(connection)

    async def _listen(self, make: Callable[[], asyncio.BaseProtocol], port: int) -> None:
        self._server = await self.loop.create_server(make, self.settings.bind_host, port, ssl=self.tls, backlog=1024)

    async def stop(self, time_is_up: asyncio.Event) -> None:
        """Stop listening, end long polls, let the answers in flight leave until `time_is_up`, close the rest."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.hear_no_more()
        self.engine.end_waiting()
        self.ticker.schedule()
        while self._is_busy and not time_is_up.is_set():
            if not self.ticker.is_busy:  # all that was answered has been written
                self._close_idle()
            await asyncio.sleep(0.005)
        for connection in list(self._connections):
            connection.close()
        self._leave_the_silent(set())
        while self._connections and not time_is_up.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.abort()

    def _close_idle(self) -> None:
        for connection in list(self._connections):
            transport = connection.transport
            if not connection.is_busy and transport is not None and not transport.is_closing():
                connection.close()

    def _leave_the_silent(self, before: set[G]) -> None:
        """A client has to say goodbye, too: one that does not read will not.

        Whoever could be left at the look before as well is left; a single look may come between two writes.
        """
        silent = {connection for connection in self._connections if _can_be_left(connection)}
        for connection in silent & before:
            connection.abort()
        for connection in self._connections:
            connection.still_sends = False
        if self._connections:  # some have still to read
            self.loop.call_later(FAREWELL_S / 2, self._leave_the_silent, silent)

    @property
    def _is_busy(self) -> bool:
        return self.ticker.is_busy or any(connection.is_busy for connection in self._connections)


def _can_be_left(connection: Guest) -> bool:
    """Whether its last replies reach the client without us.

    They do if the system has them and the client sends nothing: if something came for a socket that is closed, the
    system would drop the rest. And they have, read or not, if nothing is on its way any more.
    """
    transport = connection.transport
    if transport is None or transport.get_write_buffer_size():
        return False
    if isinstance(transport, Parted) and not connection.still_sends:
        return True
    sock = transport.get_extra_info("socket")
    try:
        return sock is not None and not any(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
    except (OSError, ValueError):
        return False  # some systems cannot tell, or it is closed by now
